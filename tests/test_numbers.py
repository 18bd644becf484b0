"""Numbers that go wrong in a run of the real engine and learner, and batches at the edge: docs/numbers.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import spiral_fast.train as train_module
from spiral_fast.commands import app
from spiral_fast.config import Config, load_config
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.problems import Draws
from spiral_fast.record.report import write_report
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.set_up import set_up
from spiral_fast.train import train
from tests.test_train import SMALL, metrics

BATCH = [
    "batch.live_problems=3",
    "batch.max_rounds=1",
    "record.save_every=1",
    "record.checkpoint_every=1",
    "learner.steps=3",
    "evaluate.samples=4",
]


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Most of the time of a run this small is its report; two tests write it themselves."""
    monkeypatch.setattr(train_module, "write_report", lambda run: None)


def run_config(folder: Path, *overrides: str) -> Config:
    return load_config("configs/demo.yaml", [*SMALL, *BATCH, f"run_dir={folder}", *overrides])


def traces(run: Path, step: int) -> list[dict]:
    return parquet.read_table(run / "traces" / f"step_{step:06d}.parquet").to_pylist()


def state(run: Path, step: int) -> dict[str, bytes]:
    """Adapter and optimiser of a checkpoint, to the bit."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    tensors = {
        f"{name}/{key}": value.numpy().tobytes()
        for name in ("adapter_model", "optimizer")
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }
    return tensors | {"learner": (folder / "learner.json").read_bytes()}


class Fault:
    """Breaks a number of the running training in the steps it is given, and is silent in all others."""

    def __init__(self, run: Path, steps: set[int], kind: str, monkeypatch):
        self.run, self.steps, self.kind = run, steps, kind
        self.engine_problem: str | None = None  # of the trace whose log-prob was broken
        if kind == "reported log-prob":
            complete = RadixEngine._complete

            def broken(engine, rows, row, stopped):
                ticket, completion = complete(engine, rows, row, stopped)
                if self.due and self.engine_problem is None:
                    self.engine_problem = rows.entry[row].request.key.problem
                    completion.logp[-1] = -np.inf
                return ticket, completion

            monkeypatch.setattr(RadixEngine, "_complete", broken)
        monkeypatch.setattr(train_module, "set_up", self.set_up)

    @property
    def due(self) -> bool:
        file = self.run / "metrics.jsonl"
        recorded = len(file.read_text().splitlines()) if file.exists() else None
        return recorded is not None and recorded + 1 in self.steps and self.evaluated

    @property
    def evaluated(self) -> bool:
        return (self.run / "eval_before.json").exists()

    def set_up(self, config, **options):
        parts = set_up(config, **options)
        layer = parts.loaded.causal_lm.get_decoder().layers[1]
        if self.kind in ("loss", "logits"):  # learner: with a gradient; engine: without

            def to_nan(module, args, output):
                return output * torch.nan if self.due and torch.is_grad_enabled() == (self.kind == "loss") else output

            layer.mlp.register_forward_hook(to_nan)
        if self.kind == "gradient":
            matrix = layer.mlp.up_proj.lora_A["default"].weight
            matrix.register_hook(lambda g: g.index_fill(1, torch.tensor([0]), torch.inf) if self.due else g)
        return parts


KINDS = {
    "loss": "a learner log-prob is not finite",
    "gradient": "gradient norm is ",
    "reported log-prob": "a rollout log-prob is not finite",
    "logits": "the model's logits are not finite under policy version 1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_skipped_and_recorded_and_the_next_one_is_made(tmp_path, monkeypatch, kind):
    fault = Fault(tmp_path / "run", {2}, kind, monkeypatch)
    run = train(run_config(tmp_path / "run"))
    check_skipped(run, {2}, KINDS[kind])
    blamed = metrics(run)[1]["skipped_problems"]
    if kind == "reported log-prob":
        assert blamed == [fault.engine_problem]
        assert blamed[0] in write_report(run).read_text()
    elif kind != "logits":  # of those nothing of the round is left
        assert blamed == list(dict.fromkeys(row["problem"] for row in traces(run, 2) if row["outcome"] == "live"))


def check_skipped(run: Path, skipped: set[int], reason: str) -> None:
    """Exactly these steps, recorded with problems of the run; adapter and optimiser move in all others alone."""
    version = 0
    for step in metrics(run):
        at = step["step"]
        version += at not in skipped
        assert step["policy_version"] == version
        assert bool(step["skipped"]) == bool(step["skipped_problems"]) == (at in skipped)
        if at > 1:
            assert (state(run, at) == state(run, at - 1)) == (at in skipped)
        if at in skipped:
            assert reason in step["skipped"]
            assert all(problem.startswith("parts-") for problem in step["skipped_problems"])


REWARD = """
from pathlib import Path

from spiral_fast.problems.parts import check
from spiral_fast.trace import Problem


def reward(question, answer, completion, finish_reason, data):
    if Path({flag!r}).read_text() == question:
        return float({value!r})
    return {otherwise}
"""
BY_CHECK = "float(check(Problem('', question, answer, data), completion, finish_reason))"
BY_TEXT = "float(sum(map(ord, completion)) % 2)"  # some traces of every problem are right, whatever they say


def reward_function(tmp_path: Path, value: str = "nan", otherwise: str = BY_TEXT) -> list[str]:
    """Overrides for a reward that is `value` for the question that the file `flag` holds."""
    (tmp_path / "flag").write_text("")
    text = REWARD.format(flag=str(tmp_path / "flag"), value=value, otherwise=otherwise)
    (tmp_path / "mine.py").write_text(text)
    return ["reward.kind=function", f"reward.function={tmp_path}/mine.py:reward"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite(tmp_path, value):
    config = run_config(tmp_path / "run", *reward_function(tmp_path, value))
    problems = set_up(config).problems.train
    order = Draws(len(problems), config.seed)
    bad = problems[order[4]]  # drawn in the second step
    (tmp_path / "flag").write_text(bad.question)
    run = train(config)
    check_skipped(run, {2}, f"the reward is not a finite number for the problems '{bad.id}'")
    assert metrics(run)[1]["skipped_problems"] == [bad.id]


@pytest.mark.parametrize("kind", ["gradient", "logits"])
def test_a_streak_stops_the_run_with_one_line_and_a_checkpoint_to_go_on_from(tmp_path, monkeypatch, kind):
    run = tmp_path / "run"
    fault = Fault(run, {2, 3, 4, 5}, kind, monkeypatch)
    command = ["train", "configs/demo.yaml", *SMALL, *BATCH, f"run_dir={run}", "learner.max_skipped_steps=2"]
    done = CliRunner().invoke(app, [*command, "learner.steps=6"])
    assert done.exit_code == 1
    lines = [line for line in done.output.splitlines() if "error:" in line]
    assert len(lines) == 1 and "Traceback" not in done.output
    assert (
        lines[0].startswith("error: step 3: ") and KINDS[kind] in lines[0] and "learner.max_skipped_steps" in lines[0]
    )
    check_skipped(run, {2, 3}, KINDS[kind])
    assert state(run, 3) == state(run, 1)
    fault.steps = set()  # whatever it was has been mended
    done = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert done.exit_code == 0, done.output
    assert [step["skipped"] is None for step in metrics(run)] == [True, False, False, True, True, True]


def test_a_good_step_ends_the_streak(tmp_path, monkeypatch):
    Fault(tmp_path / "run", {2, 3, 5, 6}, "gradient", monkeypatch)
    run = train(run_config(tmp_path / "run", "learner.max_skipped_steps=3", "learner.steps=7"))
    check_skipped(run, {2, 3, 5, 6}, KINDS["gradient"])


def test_in_an_evaluation_the_run_stops_at_once(tmp_path, monkeypatch):
    fault = Fault(tmp_path / "run", {3}, "logits", monkeypatch)
    monkeypatch.setattr(Fault, "due", property(lambda fault: len(metrics(fault.run)) == 3))
    command = ["train", "configs/demo.yaml", *SMALL, *BATCH, f"run_dir={fault.run}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "error: problem 'parts-" in done.output and "Traceback" not in done.output
    assert len(metrics(fault.run)) == 3 and state(fault.run, 3) != state(fault.run, 2)
    monkeypatch.undo()
    done = CliRunner().invoke(app, ["train", "--resume", str(fault.run)])
    assert done.exit_code == 0 and (fault.run / "eval_after.json").exists(), done.output


def test_weights_that_an_update_makes_diverge(tmp_path):
    """Every number of that update is finite; the next rollout finds out; the checkpoint before it is still there."""
    changes = ["learner.learning_rate=1e25", "learner.warmup_steps=0", "learner.steps=9", "record.checkpoint_every=50"]
    run = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="step 4: .*logits are not finite under policy version 1"):
        train(run_config(run, *changes, *reward_function(tmp_path)))
    check = [load_file(run / "checkpoints" / f"step_{n:06d}" / "adapter_model.safetensors") for n in (0, 1, 4)]
    largest = [max(value.abs().max().item() for value in tensors.values()) for tensors in check]
    assert largest[0] < 1 and largest[1] == largest[2] > 1e24


def test_a_batch_with_no_live_problem_is_no_number_that_went_wrong(tmp_path):
    """Every step is skipped, drawing goes on, and the run ends as any other."""
    config = run_config(tmp_path / "run", *reward_function(tmp_path, otherwise="0.0"), "learner.max_skipped_steps=1")
    run = train(config)
    for step in metrics(run):
        assert (step["skipped"], step["skipped_problems"], step["policy_version"]) == ("no live row", [], 0)
        assert (step["problems/live"], step["problems/dead"]) == (0, 3)
    assert {row["draw"] for step in (1, 2, 3) for row in traces(run, step)} == set(range(9))
    assert state(run, 3).keys() == state(run, 1).keys() and write_report(run).exists()


def test_responses_of_one_token(tmp_path):
    """L_max = 1, at a temperature at which they differ. Trained on like any other."""
    limits = ["rollout.temperature=4", "rollout.search_max_new_tokens=1", "rollout.aggregation_max_new_tokens=1"]
    run = train(run_config(tmp_path / "run", *limits, *reward_function(tmp_path), "evaluate.rsa.steps=0"))
    for step in metrics(run):
        rows = traces(run, step["step"])
        assert {row["length"] for row in rows} == {1} and {len(row["logp"]) for row in rows} == {1}
        assert step["logp_gap/max"] < 1e-4
        assert (step["skipped"] is None) == (step["problems/live"] > 0)
    assert any(step["skipped"] is None for step in metrics(run))


@pytest.fixture(scope="module")
def silent_adapter(tmp_path_factory) -> Path:
    """An adapter that ends most of its responses at once, by a few real supervised steps."""
    folder = tmp_path_factory.mktemp("silent")
    config = run_config(folder / "none")
    parts = set_up(config)
    learner = Learner(config, parts.loaded)
    eos = min(parts.loaded.eos_token_ids)
    prompts = [parts.prompts.search(problem) for problem in parts.problems.train[:16]]
    prompts += [parts.prompts.aggregation(problem, [[eos]] * 4) for problem in parts.problems.train[:16]]
    rows = [Row(prompt, [eos], None, 0.0, 0.0, 0) for prompt in prompts]
    while learner.supervised_step(rows, 2e-3) > 0.5:  # nats: then 60 % are empty
        pass
    (folder / "adapter").mkdir()
    learner.save(folder / "adapter")
    return folder / "adapter"


def test_empty_responses(tmp_path, silent_adapter):
    """The first token ends it: a text of nothing, wrong, quoted as nothing, and trained on its one token."""
    changes = [f"model.adapter={silent_adapter}", "learner.steps=1", *reward_function(tmp_path)]
    run = train(run_config(tmp_path / "run", *changes))
    rows = traces(run, 1)
    empty = [row for row in rows if row["text"] == ""]
    assert {row["level"] for row in empty} == {0, 1} and len(empty) < len(rows)
    for row in empty:
        assert (row["length"], row["finish_reason"], row["reward"]) == (1, "stop", 0.0)
        assert (row["verdict"], row["answer_found"]) == ("wrong", None)
    by_key = {(row["draw"], row["index"]): row for row in rows if row["level"] == 0}
    for row in rows:
        if row["level"] == 1 and row["index"] == 0:  # its prompt: the problem, labels and texts, and a last token
            quoted = [by_key[row["draw"], i] for i in row["members"]]
            words = sum(len(member["text"].split()) for member in quoted)
            assert row["prompt_length"] == by_key[row["draw"], 0]["prompt_length"] + len(quoted) + words
    (step,) = metrics(run)
    assert step["skipped"] is None and step["logp_gap/max"] < 1e-4
    assert any(row["credit"] for row in empty)


def test_responses_cut_at_the_limit_are_graded_then_credited_then_gated(tmp_path):
    """The reward sees the text as far as it goes; the gate comes last and takes positive credit alone."""
    gate = ["credit.search_target_length=6", "credit.aggregation_target_length=6"]
    limits = ["rollout.search_max_new_tokens=8", "rollout.aggregation_max_new_tokens=8", "evaluate.rsa.steps=0"]
    rewards = reward_function(tmp_path)
    run = train(run_config(tmp_path / "run", *gate, *limits, *rewards, "learner.steps=1"))
    cut = [row for row in traces(run, 1) if row["finish_reason"] == "length"]
    assert cut and {row["length"] for row in cut} == {8}
    for row in cut:
        assert row["reward"] == sum(map(ord, row["text"])) % 2 and row["verdict"] in ("correct", "wrong")
        assert row["credit"] <= 0 and (row["credit"] == 0 if row["gated"] else True)
    right_but_gated = [row for row in cut if row["reward"] == 1 and row["gated"]]
    assert right_but_gated, "the reward of a gated trace stays what it was"
    # the others' credits are those without a gate: it changes no baseline
    free = train(run_config(tmp_path / "free", *limits, *rewards, "learner.steps=1"))
    for gated, plain in zip(traces(run, 1), traces(free, 1), strict=True):
        assert gated["tokens"] == plain["tokens"] and gated["reward"] == plain["reward"]
        assert gated["credit"] == (0.0 if gated["gated"] else plain["credit"])
        assert gated["gated"] == (plain["credit"] > 0 and plain["length"] > 6)


def test_the_task_parts_grades_a_cut_response_wrong(tmp_path):
    limits = ["rollout.search_max_new_tokens=8", "rollout.aggregation_max_new_tokens=8"]
    run = train(run_config(tmp_path / "run", *limits, "learner.steps=1"))
    cut = [row for row in traces(run, 1) if row["finish_reason"] == "length"]
    assert cut and {row["reward"] for row in cut} == {0.0}


@pytest.mark.parametrize("n_problems", [7, 2])
def test_the_data_end_in_the_middle_of_a_batch(tmp_path, n_problems):
    """The next epoch, in an order of its own, begins within the batch, which may then hold a problem twice."""
    config = run_config(tmp_path / "run", f"problems.train_size={n_problems}", *reward_function(tmp_path))
    run = train(config)
    problems, order = set_up(config).problems.train, Draws(n_problems, config.seed)
    drawn = {row["draw"]: row["problem"] for step in (1, 2, 3) for row in traces(run, step)}
    assert drawn == {draw: problems[order[draw]].id for draw in range(9)}
    assert {drawn[draw] for draw in range(n_problems)} == {problem.id for problem in problems}
    for step in metrics(run):
        assert step["problems/drawn"] == 3 and step["skipped"] is None
        assert step["problems/epoch"] == pytest.approx(3 * step["step"] / n_problems)
    if n_problems == 2:  # the same problem twice in one batch: other traces, and a credit of its own for each
        first = [row for row in traces(run, 1) if row["problem"] == drawn[0]]
        by_draw = {draw: [row["tokens"] for row in first if row["draw"] == draw] for draw in {r["draw"] for r in first}}
        assert len(first) in (24, 48) and len({str(tokens) for tokens in by_draw.values()}) == len(by_draw)
