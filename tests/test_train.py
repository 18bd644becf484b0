"""Whole runs of the training loop on real models, small in every size."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.loss_rows import loss_rows
from spiral_fast.record.report import write_report
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey
from spiral_fast.train import train

SMALL = [
    "learner.steps=2",
    "batch.live_problems=4",
    "problems.train_size=32",
    "problems.eval_size=4",
    "evaluate.samples=4",
    "evaluate.pass_at=[1,4]",
    "evaluate.majority_at=[4]",
    "evaluate.rsa.steps=1",
    "evaluate.bootstrap=20",
    "threads=1",
]


def small(run: Path, *overrides: str, config: str = "demo") -> Config:
    return load_config(f"configs/{config}.yaml", [*SMALL, f"run_dir={run}", *overrides])


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_time(run: Path) -> list[dict]:
    return [{k: v for k, v in step.items() if not k.startswith(("time/", "memory/"))} for step in metrics(run)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return train(small(tmp_path_factory.mktemp("runs") / "demo", "record={save_every: 1, checkpoint_every: 1}"))


def test_a_run_leaves_everything_behind(demo):
    for name in ("config.yaml", "environment.json", "eval_before.json", "eval_after.json", "report.html"):
        assert (demo / name).stat().st_size > 0, name
    steps = metrics(demo)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["problems/drawn"] == 4 == step["problems/live"] + step["problems/dead"]
        assert step["tokens/prompt"] == step["tokens/cached"] + step["tokens/computed"]
        assert 0 <= step["logp_gap/max"] < 1e-4
        assert step["skipped"] is None and step["grad/norm"] > 0
    names = ["best.json", "step_000000", "step_000001", "step_000002"]
    assert sorted(path.name for path in (demo / "checkpoints").iterdir()) == names
    rows = parquet.read_table(demo / "traces" / "step_000001.parquet").to_pylist()
    assert len(rows) == 4 * 24
    assert sum(len(row["text"]) > 0 for row in rows) == len(rows)
    assert sum(row["credit"] != 0 for row in rows) == steps[0]["learner/live_rows"]
    evaluation = json.loads((demo / "eval_after.json").read_text())
    assert list(evaluation["pass_at_k"]) == ["1", "4"] and len(evaluation["rsa"]) == 2


def test_the_adapter_moved_and_loads_in_plain_peft(demo):
    base = AutoModelForCausalLM.from_pretrained("spiral_fast/models/parts")
    adapters = [
        PeftModel.from_pretrained(base, demo / "checkpoints" / name).get_base_model().state_dict()
        for name in ("step_000001", "step_000002")
    ]
    moved = [name for name in adapters[0] if not torch.equal(adapters[0][name], adapters[1][name])]
    assert moved and all("lora_" in name for name in moved)


def test_the_same_config_gives_the_same_run_bit_for_bit(demo, tmp_path):
    again = train(small(tmp_path / "again"))
    assert without_time(again) == without_time(demo)
    before = [json.loads((run / "eval_after.json").read_text())["pass_at_k"] for run in (demo, again)]
    assert before[0] == before[1]


def test_another_seed_gives_another_run(demo, tmp_path):
    other = train(small(tmp_path / "other", "seed=1", "learner.steps=1"))
    assert without_time(other)[0] != without_time(demo)[0]


def test_micro_batches_do_not_change_the_run(demo, tmp_path):
    split = train(small(tmp_path / "split", "learner.micro_batch_tokens=400", "learner.steps=1"))
    whole, cut = without_time(demo)[0], without_time(split)[0]
    assert cut["learner/micro_batches"] > 4 > whole["learner/micro_batches"]
    for key in ("loss", "grad/norm", "grad/norm_search", "grad/norm_aggregation", "grad/cosine"):
        assert cut[key] == pytest.approx(whole[key], rel=1e-5), key


def test_a_used_folder_is_refused_and_left_alone(demo):
    before = (demo / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="run_dir"):
        train(small(demo))
    assert (demo / "metrics.jsonl").read_text() == before


def test_grpo(tmp_path):
    run = train(small(tmp_path / "grpo", config="demo_grpo"))
    step = metrics(run)[0]
    assert step["grad/norm_search"] == step["grad/norm"] > 0
    assert "reward/aggregation" not in step
    assert step["tokens/generated"] == 4 * 24 * 19  # the sampled tokens of a SPIRAL step on the same problems
    assert len(json.loads((run / "eval_after.json").read_text())["rsa"]) == 2


def test_the_gate_acts_on_traces_of_varying_length(tmp_path):
    target = 19  # of the shortest trace
    overrides = [f"credit.{level}_target_length={target}" for level in ("search", "aggregation")]
    run = train(small(tmp_path / "gate", *overrides, "learner.steps=3", config="demo_variable"))
    rows = [row for path in sorted((run / "traces").iterdir()) for row in parquet.read_table(path).to_pylist()]
    gated = [row for row in rows if row["gated"]]
    assert gated and all(row["credit"] == 0 and row["length"] > target for row in gated)
    assert not any(row["credit"] > 0 and row["length"] > target for row in rows)
    assert any(row["credit"] < 0 and row["length"] > target for row in rows)
    assert len({row["length"] for row in rows}) > 2
    shares = [step["credit/gated_share_search"] + step["credit/gated_share_aggregation"] for step in metrics(run)]
    assert max(shares) > 0
    # Dynamic sampling: a second round only where the first left fewer live problems than wanted.
    steps = metrics(run)
    for step in steps:
        assert step["problems/drawn"] == 4 * step["problems/rounds"]
        assert step["problems/drawn"] == step["problems/live"] + step["problems/dead"] + step["problems/discarded"]
        assert step["problems/live"] <= 4
    assert max(step["problems/rounds"] for step in steps) == 2


def test_a_step_without_credit_is_skipped_and_the_run_goes_on(tmp_path):
    overrides = [
        "rollout.search_max_new_tokens=4",
        "rollout.aggregation_max_new_tokens=4",
        "record={save_every: 1, checkpoint_every: 1}",
    ]
    run = train(small(tmp_path / "dead", *overrides))
    for step in metrics(run):
        assert step["problems/live"] == 0 and step["skipped"] == "no live row" and step["policy_version"] == 0
    first, last = (run / "checkpoints" / f"step_00000{i}" / "adapter_model.safetensors" for i in (1, 2))
    assert first.read_bytes() == last.read_bytes()


@pytest.mark.parametrize(
    ("when", "number", "code"),
    [("evaluation", signal.SIGINT, 130), ("training", signal.SIGINT, 130), ("training", signal.SIGTERM, 143)],
)
def test_a_stop_ends_soon_and_the_run_goes_on_as_if_there_was_none(demo, tmp_path, when, number, code):
    run = tmp_path / "stopped"
    overrides = [*SMALL, "learner.steps=10000", f"run_dir={run}"]
    if when == "evaluation":
        overrides += ["problems.eval_size=2000", "evaluate.samples=64"]
    command = [sys.executable, "-m", "spiral_fast.cli", "train", "configs/demo.yaml", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / "config.yaml").exists() or (when == "training" and len(metrics(run)) < 3):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.1)
        with pytest.raises(ConfigError, match="is being written by another process"):
            train(load_config(run / "config.yaml"), resume=True)  # a second trainer
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert f"spiral-fast train --resume {run}" in errors.splitlines()[-1] and "Traceback" not in errors
    assert "incomplete" in write_report(run).read_text()
    if when == "evaluation":
        return
    done = len(metrics(run))
    assert (run / "checkpoints" / f"step_{done:06d}" / "adapter_model.safetensors").exists()
    subprocess.run(
        [sys.executable, "-m", "spiral_fast.cli", "train", "--resume", str(run), f"learner.steps={done + 1}"],
        check=True,
        capture_output=True,
    )
    assert without_time(run)[:2] == without_time(demo) and len(metrics(run)) == done + 1


def test_fsdp_gives_the_same_run(demo, tmp_path):
    run = tmp_path / "fsdp"
    overrides = [*SMALL, f"run_dir={run}", "learner.fsdp=true"]
    command = [sys.executable, "-m", "spiral_fast.cli", "train", "configs/demo.yaml", *overrides]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for sharded, plain in zip(without_time(run), without_time(demo), strict=True):
        for key in ("loss", "grad/norm", "grad/cosine", "reward/search", "tokens/generated"):
            assert sharded[key] == pytest.approx(plain[key], rel=1e-5), key


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_steps_of_a_real_model(tmp_path):
    overrides = [
        "warm_start.steps=6",
        "learner.steps=2",
        "batch={live_problems: 2, round_problems: 2, max_rounds: 2}",
        "rollout.search_max_new_tokens=32",
        "rollout.aggregation_max_new_tokens=32",
        "problems.train_size=32",
        "problems.eval_size=2",
        "evaluate.samples=4",
        "evaluate.pass_at=[1,4]",
        "evaluate.majority_at=[4]",
        "evaluate.rsa={steps: 1, population: 4, set_size: 4}",
        f"run_dir={tmp_path / 'smollm2'}",
    ]
    run = train(load_config("configs/smollm2_cpu.yaml", overrides))
    for step in metrics(run):
        assert step["logp_gap/mean"] < 0.05  # bfloat16: the packed and the cached forward round differently
        assert step["tokens/computed"] < 0.5 * step["tokens/prompt"]
    assert any(step["skipped"] is None and step["grad/norm"] > 0 for step in metrics(run))
    assert (run / "report.html").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_jsonl_file_graded_by_math_verify(tmp_path):
    for name in ("train", "eval"):
        rows = [{"question": f"What is {n} + {n} ({name})?", "answer": str(2 * n)} for n in range(1, 5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"problems={{source: jsonl, train_file: {tmp_path / 'train.jsonl'}, eval_file: {tmp_path / 'eval.jsonl'}}}",
        "problems.eval_size=4",
        "warm_start.steps=0",
        "learner.steps=1",
        "batch={live_problems: 1, max_rounds: 1}",
        "rollout={n_search: 4, n_sets: 2, set_size: 2, n_aggregations: 2}",
        "rollout.search_max_new_tokens=24",
        "rollout.aggregation_max_new_tokens=24",
        "evaluate={samples: 2, pass_at: [1], majority_at: [], rsa: {steps: 0}, bootstrap: 20}",
        f"run_dir={tmp_path / 'run'}",
    ]
    run = train(load_config("configs/smollm2_cpu.yaml", overrides))
    (rows,) = (parquet.read_table(path).to_pylist() for path in (run / "traces").iterdir())
    assert len(rows) == 8
    (answer,) = {row["answer"] for row in rows if row["answer"]}
    for row in rows:
        boxes = re.findall(r"\\boxed\{(-?\d+)\}", row["text"])
        if boxes or "boxed" not in row["text"]:
            assert row["verdict"] == ("correct" if boxes and boxes[-1] == answer else "wrong"), row["text"]
    assert metrics(run)[0]["reward/could_not_grade"] == 0


def problem_rollout(credits: list[float], levels: list[int]) -> ProblemRollout:
    traces = []
    for index, (credit, level) in enumerate(zip(credits, levels, strict=True)):
        key = TraceKey("p", level, -1 if level == SEARCH else 0, index)
        traces.append(Trace(key, [1], [2, 3], np.zeros(2, np.float32), "stop", 0, credit=credit))
    search = [trace for trace in traces if trace.key.level == SEARCH]
    aggregation = [trace for trace in traces if trace.key.level == AGGREGATION]
    return ProblemRollout(Problem("p", "", ""), 0, search, np.zeros((1, 1), np.int64), [aggregation])


def test_rows_are_averaged_over_problems_and_only_search_rows_are_reweighted(tmp_path):
    live = [problem_rollout([0.5, -0.5], [SEARCH, AGGREGATION]), problem_rollout([0.0, 1.0], [SEARCH, AGGREGATION])]
    plain = loss_rows(live, small(tmp_path))
    assert [(row.credit, row.weight) for row in plain] == [(0.5, 0.5), (-0.5, 0.5), (0.0, 0.5), (1.0, 0.5)]
    weighted = loss_rows(live, small(tmp_path, "credit.search_weight=unbiased"))
    assert [row.weight for row in weighted] == pytest.approx([0.5 * 12 / 0.8858, 0.5] * 2, rel=1e-4)
    assert loss_rows([], small(tmp_path)) == []
