"""The learner alone on stored traces must make the steps of the run that stored them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import ConfigError
from spiral_fast.record.trace_store import read_rollouts, write_traces
from spiral_fast.replay import replay
from spiral_fast.replay_checks import trace_files
from spiral_fast.train import train
from tests.record.test_trace_store import as_an_older_version, same
from tests.test_train import SMALL, metrics, small

OF_THE_ENGINE = {"tokens/prompt", "tokens/cached", "tokens/computed", "tokens/generated"}
OF_THE_LOOP = {"problems/rounds", "problems/epoch"}
# Two rounds for some steps, dead and discarded problems, a gate, a clip, a warm start, unequal weights.
SETTINGS = [
    "learner.steps=3",
    "batch.live_problems=3",
    "batch.round_problems=2",
    "credit.search_target_length=19",
    "credit.search_weight=unbiased",
    "learner.clip_norm=0.05",
    "learner.warmup_steps=2",
    "warm_start.steps=2",
    "record.writers=[]",
]


def settings_of(run: Path, *overrides: str):
    return small(run, *SETTINGS, *overrides, config="demo_variable")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return train(settings_of(tmp_path_factory.mktemp("runs") / "original"))


def test_the_same_steps_to_the_bit(original, tmp_path):
    run = replay(settings_of(tmp_path / "again"), original)
    stored, again = metrics(original), metrics(run)
    assert [step["step"] for step in again] == [1, 2, 3]
    for before, after in zip(stored, again, strict=True):
        kept = {key for key in before if not key.startswith("time/")} - OF_THE_ENGINE - OF_THE_LOOP
        assert kept <= after.keys() and not OF_THE_ENGINE & after.keys()
        assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
        assert after["grad/norm"] > 0 and after["skipped"] is None
    assert any(step["grad/clipped"] for step in again)
    assert sum(step["credit/gated_share_search"] for step in again) > 0
    assert sum(step["problems/dead"] + step["problems/discarded"] for step in again) > 0
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        left, right = (load_file(folder / "checkpoints" / "step_000003" / name) for folder in (original, run))
        assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    for step in (1, 2, 3):
        files = [folder / "traces" / f"step_{step:06d}.parquet" for folder in (original, run)]
        for before, after in zip(*map(read_rollouts, files), strict=True):
            same(before, after)
        assert pq.read_table(files[0], columns=["outcome"]) == pq.read_table(files[1], columns=["outcome"])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000003"]
    page = (run / "report.html").read_text()
    assert "Replayed" in page and "incomplete" not in page
    assert not list(run.glob("eval_*.json"))


def test_credits_are_computed_anew(original, tmp_path):
    """Another gate on the same traces; credits that the file holds are not read."""
    shutil.copytree(original / "traces", tmp_path / "traces")
    for file in (tmp_path / "traces").iterdir():
        rollouts = read_rollouts(file)
        for rollout in rollouts:
            for trace in rollout.traces():
                trace.credit, trace.gated = 17.0, True
        write_traces(tmp_path / "traces", int(file.stem[-6:]), rollouts)
    again = metrics(replay(settings_of(tmp_path / "again"), tmp_path / "traces"))
    assert [step["loss"] for step in again] == [step["loss"] for step in metrics(original)]
    open_gate = metrics(replay(settings_of(tmp_path / "open", "credit.search_target_length=null"), original))
    assert open_gate[0]["credit/gated_share_search"] == 0 and open_gate[0]["loss"] != again[0]["loss"]


def test_credit_that_comes_from_answers_in_sets_without_aggregation(tmp_path):
    original = train(small(tmp_path / "original", "learner.steps=1", config="demo_poly_epo"))
    run = replay(small(tmp_path / "again", "learner.steps=1", config="demo_poly_epo"), original)
    (before,), (after,) = metrics(original), metrics(run)
    assert before["loss"] == after["loss"] != 0 and before["credit/abs_mean_search"] == after["credit/abs_mean_search"]


def test_one_file_is_one_step(original, tmp_path):
    run = replay(settings_of(tmp_path / "one"), original / "traces" / "step_000002.parquet")
    (step,) = metrics(run)
    assert step["step"] == 2 and step["reward/search"] == metrics(original)[1]["reward/search"]
    assert step["logp_gap/mean"] != metrics(original)[1]["logp_gap/mean"]  # step 1 was not made


def test_on_the_command_line(original, tmp_path):
    overrides = [*SMALL, *SETTINGS, "learner.steps=3", f"run_dir={tmp_path / 'again'}"]
    traces = str(original / "traces" / "step_000001.parquet")
    done = CliRunner().invoke(app, ["train", "configs/demo_variable.yaml", *overrides, "--replay", traces])
    assert done.exit_code == 0 and f"report {tmp_path / 'again' / 'report.html'}" in done.output
    done = CliRunner().invoke(app, ["train", "configs/demo_variable.yaml", *overrides, "--replay", traces])
    assert done.exit_code == 2 and "already holds a run" in done.output
    done = CliRunner().invoke(app, ["train", "--resume", str(original), "--replay", traces])
    assert done.exit_code == 2 and done.output == "error: --replay: makes a new run of a config; leave out --resume\n"


def test_gaps_and_empty_folders_are_refused(original, tmp_path):
    with pytest.raises(ConfigError, match="--replay: .* holds no traces"):
        trace_files(tmp_path)
    with pytest.raises(ConfigError, match="--replay: .* holds no traces"):
        trace_files(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not a file of traces"):
        trace_files(original / "metrics.jsonl")
    shutil.copytree(original / "traces", tmp_path / "traces")
    (tmp_path / "traces" / "step_000002.parquet").unlink()
    with pytest.raises(ConfigError, match="lacks step 2;"):
        replay(settings_of(tmp_path / "again"), tmp_path)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("token", [68, -1])
@pytest.mark.parametrize("part", ["prompt", "tokens"])
def test_traces_of_another_model_are_refused(original, tmp_path, part, token):
    rollouts = read_rollouts(original / "traces" / "step_000001.parquet")
    getattr(rollouts[1].aggregation[2][0], part)[3] = token  # the built-in model has 0 .. 67
    write_traces(tmp_path / "traces", 1, rollouts)
    with pytest.raises(ConfigError, match=rf"step_000001.parquet: token {token}; the model has 68: another model"):
        replay(settings_of(tmp_path / "again"), tmp_path)
    assert not (tmp_path / "again").exists()


def test_traces_beyond_the_context_are_refused(original, tmp_path):
    rollouts = read_rollouts(original / "traces" / "step_000001.parquet")
    rollouts[1].search[0].prompt[:] = [3] * 1020
    write_traces(tmp_path / "traces", 1, rollouts)
    problem = rollouts[1].problem.id
    with pytest.raises(ConfigError, match=rf"problem '{problem}' has 10\d\d tokens.*context is 1024"):
        replay(settings_of(tmp_path / "again"), tmp_path)


def test_traces_of_another_shape_or_version_are_refused(original, tmp_path):
    with pytest.raises(ConfigError, match=r"has \[8, 4, 4, 4\] \(search traces.* asks for \[8, 4, 2, 4\]"):
        replay(settings_of(tmp_path / "shape", "rollout.set_size=2", "warm_start.steps=0"), original)
    shutil.copytree(original / "traces", tmp_path / "traces")
    for file in (tmp_path / "traces").iterdir():
        as_an_older_version(file)
    with pytest.raises(ConfigError, match="an older version wrote it"):
        replay(settings_of(tmp_path / "old", "warm_start.steps=0"), tmp_path)
    assert not (tmp_path / "shape").exists() and not (tmp_path / "old").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda rows: [{"a": 1}], "row 0 has no problem: not traces of a step"),
        (lambda rows: [rows[0], rows[1] | {"reward": None}, *rows[2:]], "row 1 has no reward"),
        (lambda rows: [rows[0], rows[1] | {"logp": [0.0]}, *rows[2:]], "row 1 is damaged: length, tokens and"),
        (lambda rows: [rows[0], rows[1] | {"tokens": [1]}, *rows[2:]], "row 1 is damaged: length, tokens and"),
    ],
)
def test_files_that_hold_no_whole_traces_are_refused(original, tmp_path, damage, says):
    rows = pq.read_table(original / "traces" / "step_000001.parquet").to_pylist()
    file = tmp_path / "step_000001.parquet"
    pq.write_table(pa.Table.from_pylist(damage(rows)), file)
    with pytest.raises(ConfigError, match=f"step_000001.parquet: {says}"):
        replay(settings_of(tmp_path / "again"), file)
    assert not (tmp_path / "again").exists()


def test_a_step_without_live_problem_is_skipped_again(original, tmp_path):
    rollouts = read_rollouts(original / "traces" / "step_000001.parquet")
    for rollout in rollouts:
        for trace in rollout.traces():
            trace.reward = 1.0
    write_traces(tmp_path / "traces", 1, rollouts)
    (step,) = metrics(replay(settings_of(tmp_path / "again", "warm_start.steps=0"), tmp_path))
    assert step["skipped"] == "no live row" and step["problems/live"] == 0 and step["skipped_problems"] == []
    assert json.loads((tmp_path / "again" / "replay.json").read_text()) == {"traces": str(tmp_path)}
