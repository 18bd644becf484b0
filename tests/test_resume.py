"""A run killed at any instant goes on as if it had not been: adapter, metrics, traces and evaluations to the bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from spiral_fast.config import ConfigError, load_config
from spiral_fast.resume import resumed_config
from tests.test_train import SMALL, without_time

STEPS = 6
OVERRIDES = [
    *SMALL,
    f"learner.steps={STEPS}",
    "batch={live_problems: 3, round_problems: 2, max_rounds: 3}",
    "problems.train_size=11",  # the data end within the run
    "evaluate.every=2",
    "record={save_every: 1, checkpoint_every: 4}",
    "warm_start={steps: 2, search_examples: 2, aggregation_examples: 1}",
]


class Crashes:
    """The process of crashes.py, started again when a test was cut off while it waited for a reply."""

    def __init__(self):
        self.process: subprocess.Popen | None = None

    def run(self, folder: Path, *, resume: bool = False, kill: dict | None = None, overrides=()) -> tuple[int, float]:
        """(wait status, seconds) of one training."""
        if self.process is None:
            command, environment = [sys.executable, "-m", "tests.crashes"], os.environ | {"OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        config = load_config("configs/demo.yaml", [*OVERRIDES, f"run_dir={folder}", *overrides])
        request = {"config": config.model_dump(mode="json"), "resume": resume, "kill": kill}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            reply = json.loads(self.process.stdout.readline())
        except BaseException:
            self.end()
            raise
        return reply["status"], reply["seconds"]

    def finish(self, folder: Path) -> None:
        status, _ = self.run(folder, resume=(folder / "config.yaml").exists())
        assert status == 0, Path(f"{folder}.log").read_text()[-3000:]

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()
        self.process = None


@pytest.fixture(scope="module")
def crashes():
    crashes = Crashes()
    yield crashes
    crashes.end()


@pytest.fixture(scope="module")
def whole(crashes, tmp_path_factory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    crashes.finish(folder)
    return folder


@pytest.fixture(scope="module")
def seconds(crashes, whole, tmp_path_factory) -> float:
    """How long a run takes here and now."""
    return crashes.run(tmp_path_factory.mktemp("timed") / "run")[1]


def contents(run: Path) -> dict[str, object]:
    """Everything of a run that must not depend on whether it was stopped: all but times."""
    found: dict[str, object] = {"metrics": without_time(run)}
    for file in sorted(run.glob("checkpoints/step_*/*")):
        found[f"{file.parent.name}/{file.name}"] = file.read_bytes()
    found["best.json"] = (run / "checkpoints" / "best.json").read_text()
    for file in sorted(run.glob("traces/*")):
        found[file.name] = parquet.read_table(file).to_pylist()
    for file in sorted(run.glob("eval_*")):
        if file.suffix == ".json":
            result = json.loads(file.read_text())
            found[file.name] = {key: value for key, value in result.items() if not key.startswith("time/")}
    return found


def assert_same(run: Path, whole: Path) -> None:
    ours, theirs = contents(run), contents(whole)
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name] == theirs[name], f"{name} differs\n{Path(f'{run}.log').read_text()[-2000:]}"
    hidden = [path for path in run.rglob(".*") if not path.name.startswith(".nfs")]
    assert not hidden, "left aside by a killed process"


PLACES = [
    {"at": "spiral_fast.train:warm_start", "call": 1, "when": "after"},
    {"at": "spiral_fast.rollout.radix.engine:RadixEngine.step", "call": 3, "when": "before"},  # evaluating
    {"at": "spiral_fast.train:roll_out", "call": 3, "when": "before"},
    {"at": "spiral_fast.train:fill_live_batch", "call": 2, "when": "after"},
    {"at": "spiral_fast.learner.learner:Learner._backward", "call": 3, "when": "after"},
    {"at": "spiral_fast.learner.learner:Learner._backward", "call": 2, "when": "before"},
    {"at": "spiral_fast.learner.learner:Learner.update", "call": 2, "when": "after"},
    {"at": "spiral_fast.record.recorder:write_traces", "call": 2, "when": "after"},
    {"half_a_line": 3},
    {"at": "spiral_fast.record.recorder:Recorder.metrics", "call": 2, "when": "after"},
    {"at": "spiral_fast.learner.checkpoint:save_file", "call": 5, "when": "after"},  # adapter, not yet moments
    {"at": "spiral_fast.record.checkpoints:_digests", "call": 2, "when": "before"},
    {"at": "pathlib:Path.rename", "call": 2, "when": "before"},
    {"at": "pathlib:Path.rename", "call": 2, "when": "after"},
    {"at": "spiral_fast.record.checkpoints:shutil.rmtree", "call": 9, "when": "before"},
    {"at": "spiral_fast.record.checkpoints:Checkpoints._remove_old", "call": 5, "when": "after"},
    {"at": "spiral_fast.train:evaluate", "call": 2, "when": "after"},
    {"at": "spiral_fast.record.recorder:Recorder.evaluation", "call": 2, "when": "after"},
    {"at": "spiral_fast.train:write_report", "call": 1, "when": "before"},
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kill", PLACES, ids=lambda kill: str(kill.get("at", "metrics:half a line")).rpartition(":")[2])
def test_killed_at_every_kind_of_instant(crashes, whole, tmp_path, kill):
    run = tmp_path / "run"
    status, _ = crashes.run(run, kill=kill)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, Path(f"{run}.log").read_text()[-2000:]
    crashes.finish(run)
    assert_same(run, whole)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_instants_again_and_again(crashes, whole, seconds, tmp_path, seed):
    """One run after another, each killed up to four times, until four kills have hit: twenty over the seeds."""
    instants = random.Random(seed)
    kills = trial = 0
    while kills < 4:
        run = tmp_path / f"run_{trial}"
        trial += 1
        for _ in range(4):
            resume = (run / "config.yaml").exists()
            status, _ = crashes.run(run, resume=resume, kill={"after": instants.uniform(0.1, 0.9) * seconds})
            if not os.WIFSIGNALED(status):
                assert status == 0, Path(f"{run}.log").read_text()[-2000:]
                break
            kills += 1
        if not (run / "report.html").exists():
            crashes.finish(run)
        assert_same(run, whole)


def test_a_finished_run_can_be_made_longer_and_moved(crashes, whole, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    status, _ = crashes.run(short, overrides=["learner.steps=3"])
    assert status == 0
    short.rename(longer)
    Path(f"{short}.log").rename(f"{longer}.log")
    crashes.finish(longer)
    assert json.loads((longer / "eval_step_000003.json").read_text())["step"] == 3  # was "after"
    (longer / "eval_step_000003.json").unlink()
    assert_same(longer, whole)


def test_a_damaged_checkpoint_costs_a_step_and_changes_nothing(crashes, whole, tmp_path):
    run = tmp_path / "run"
    crashes.run(run, kill={"at": "spiral_fast.record.recorder:Recorder.metrics", "call": 4, "when": "before"})
    file = run / "checkpoints" / "step_000003" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    crashes.finish(run)
    log = Path(f"{run}.log").read_text()
    assert "checkpoint step_000003 is passed over: optimizer.safetensors has changed" in log
    assert f"resumed from {run / 'checkpoints' / 'step_000002'}" in log
    assert_same(run, whole)


def test_with_saves_few_and_far_between_more_is_made_again(crashes, whole, tmp_path):
    """From step 5 back to step 3: the checkpoint of the evaluated step 4 is damaged, its evaluation made again."""
    run, rarely = tmp_path / "run", ["record={save_every: 3, checkpoint_every: 4}"]
    crashes.run(
        run, kill={"at": "spiral_fast.record.recorder:Recorder.metrics", "call": 5, "when": "after"}, overrides=rarely
    )
    assert (run / "eval_step_000004.json").exists()
    (run / "checkpoints" / "step_000004" / "run.json").unlink()
    status, _ = crashes.run(run, resume=True, overrides=rarely)
    assert status == 0 and f"resumed from {run / 'checkpoints' / 'step_000003'}" in Path(f"{run}.log").read_text()
    ours, theirs = contents(run), contents(whole)
    shared = {name for name in theirs if "/" not in name or name.startswith("step_000006/")}
    assert shared <= ours.keys()
    for name in shared:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("learner.steps=9", True),
        ("record.keep_last=5", True),
        ("evaluate.every=3", True),
        ("learner.sharing=none", True),
        ("learner.micro_batch_tokens=99", True),
        ("learner.fsdp=true", True),
        ("rollout.servers=[http://127.0.0.1:30000]", True),
        ("rollout.sglang.start_timeout_s=9", True),
        ("rollout.sglang.deterministic=true", False),
        ("learner.learning_rate=1e-3", False),
        ("seed=4", False),
        ("rollout.max_running=3", False),
        ("threads=2", False),
        ("evaluate.bootstrap=30", False),
    ],
)
def test_only_what_leaves_the_run_the_same_may_change(whole, override, allowed):
    if allowed:
        assert resumed_config(whole, [override]).run_dir == str(whole)
        return
    with pytest.raises(ConfigError, match=rf"^{override.split('=')[0]}: .* cannot be used with --resume") as error:
        resumed_config(whole, [override])
    assert "\n" not in str(error.value)


def test_a_config_changed_by_hand_is_refused_by_key(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    begun = file.read_text()
    file.write_text(begun.replace("  eps: 1.0e-08\n", "  eps: 1.0e-07\n"))
    with pytest.raises(ConfigError, match=r"^learner.eps: 1e-07 cannot be used with --resume: .* begun with 1e-08"):
        resumed_config(tmp_path / "run", [])
    file.write_text(begun.replace(f"  steps: {STEPS}\n", "  steps: 9\n"))
    assert resumed_config(tmp_path / "run", []).learner.steps == 9


def test_fewer_steps_than_were_made_are_refused(whole):
    with pytest.raises(ConfigError, match=r"^learner.steps: 5 is too few for --resume: the run has made 6"):
        resumed_config(whole, ["learner.steps=5"])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: [*lines[:1], b"x", *lines[2:]], "line 2: not JSON"),
        (lambda lines: [*lines[:1], *lines[2:]], "line 2: step 3 follows step 1"),
        (lambda lines: [*lines[:2], b"[]", *lines[3:]], "line 3: not the metrics of a step"),
    ],
)
def test_damaged_metrics_are_named_and_nothing_is_thrown_away(whole, tmp_path, damage, says):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = run / "metrics.jsonl"
    file.write_bytes(b"\n".join(damage(file.read_bytes().split(b"\n"))))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ConfigError, match=f"metrics.jsonl, {says}$"):
        resumed_config(run, [])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("name", ["eval_before.json", "environment.json"])
def test_other_damaged_files_are_named(crashes, whole, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / name).write_text("{")
    crashes.run(run, resume=True)
    said = Path(f"{run}.log").read_text().splitlines()[-1]
    assert said.startswith(f"spiral_fast.config.ConfigError: {run / name}: damaged (")


def test_files_of_the_users_own_in_the_run_are_left_alone(crashes, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    mine = shutil.copy(run / "traces" / "step_000006.parquet", run / "traces" / "step_copy.parquet")
    crashes.finish(run)
    assert Path(mine).exists()
    Path(mine).unlink()
    assert_same(run, whole)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--resume: .* holds no run"):
        resumed_config(tmp_path, [])
