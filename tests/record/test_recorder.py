from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
import yaml

from spiral_fast.config import Config, ConfigError
from spiral_fast.record.files import CannotWrite, cannot_write, write_json, writing
from spiral_fast.record.recorder import Recorder
from tests.record.run_of_three_steps import config_of, evaluation, make_run, metrics, quiet, rollout


def test_files_of_a_run(tmp_path):
    run = make_run(tmp_path / "deep" / "run")
    assert Config.model_validate(yaml.safe_load((run / "config.yaml").read_text())) == config_of(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert math.isclose(rows[1]["reward/search"], 0.2, rel_tol=1e-6) and rows[1]["problems/live"] == 3
    assert rows[0]["grad/norm_search"] is None  # NaN is no JSON
    assert json.loads((run / "eval_after.json").read_text()) == evaluation(0.3)
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"]
    assert sorted(file.name for file in run.iterdir()) == [
        "config.yaml",
        "environment.json",
        "eval_after.json",
        "eval_before.json",
        "metrics.jsonl",
        "tensorboard",
        "traces",
    ]


def test_each_step_is_on_disk_before_the_next(tmp_path):
    with Recorder(tmp_path, config_of(tmp_path), quiet()[0]) as record:
        for step in (1, 2):
            record.metrics(step, metrics(step))
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step


def test_a_folder_that_holds_a_run_is_refused_and_untouched(tmp_path):
    make_run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"^run_dir: .* already holds a run") as error:
        Recorder(tmp_path, config_of(tmp_path, seed=1), quiet()[0])
    assert "\n" not in str(error.value) and (tmp_path / "metrics.jsonl").read_text() == before


def test_a_start_that_recorded_nothing_may_be_made_again(tmp_path):
    for seed in (0, 1):
        with pytest.raises(RuntimeError), Recorder(tmp_path, config_of(tmp_path, seed=seed), quiet()[0]) as record:
            (record.run_dir / "checkpoints" / "step_000000").mkdir(parents=True)  # what a run saves when it fails
            assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == seed
            raise RuntimeError("before the first evaluation")
    with Recorder(tmp_path, config_of(tmp_path), quiet()[0]) as record:
        assert not (tmp_path / "checkpoints" / "step_000000").exists()  # it was another start's
        record.evaluation("before", evaluation(0.2))
    with pytest.raises(ConfigError, match="already holds a run"):
        Recorder(tmp_path, config_of(tmp_path), quiet()[0])


def test_a_run_in_the_folder_of_a_replay_that_recorded_nothing_is_no_replay(tmp_path):
    (tmp_path / "replay.json").write_text('{"traces": "x"}')
    with Recorder(tmp_path, config_of(tmp_path), quiet()[0]):
        assert not (tmp_path / "replay.json").exists()


def test_checkpoints_alone_are_a_run(tmp_path):
    (tmp_path / "checkpoints" / "step_000050").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        Recorder(tmp_path, config_of(tmp_path), quiet()[0])


def test_two_runs_never_write_one_folder(tmp_path):
    with Recorder(tmp_path, config_of(tmp_path), quiet()[0]):
        with pytest.raises(ConfigError, match="is being written by another process"):
            Recorder(tmp_path, config_of(tmp_path, seed=1), quiet()[0])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_names_the_file(tmp_path):
    record = Recorder(tmp_path, config_of(tmp_path), quiet()[0])
    record._metrics = open("/dev/full", "a")
    with pytest.raises(CannotWrite, match=r"metrics.jsonl: cannot be written \(No space left on device\)$"):
        record.metrics(1, metrics(1))
    with pytest.raises(CannotWrite, match=r"metrics.jsonl: cannot be written"):
        record.close()
    with pytest.raises(CannotWrite, match=r"eval_x.json: cannot be written \(Not a directory\)$"):
        write_json(tmp_path / "config.yaml" / "eval_x.json", {})


def test_a_failed_write_is_found_behind_what_followed_it():
    full = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "No space left" in cannot_write(full)
    assert (
        cannot_write(OSError(errno.ENOSPC, "No space left on device", "x")) == "[Errno 28] No space left on device: 'x'"
    )
    assert cannot_write(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    try:
        try:
            raise CannotWrite("traces: cannot be written (No space left on device)")
        finally:
            raise full
    except Exception as error:
        assert cannot_write(error) == "traces: cannot be written (No space left on device)"


def test_a_file_is_named_once_when_a_second_write_fails_too(tmp_path):
    """A run that could not save tries once more on its way out."""
    full = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(CannotWrite) as error:
        try:
            with writing(tmp_path / "file"):
                raise full
        finally:
            with writing(tmp_path / "file"):
                raise full
    assert str(error.value).count("cannot be written") == 1


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    done = []
    real = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), real[0](fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), real[1](old, new)))
    write_json(tmp_path / "eval_x.json", {})
    assert done == [str(tmp_path / ".eval_x.json.tmp"), "renamed"]


def test_traces_can_be_off(tmp_path):
    config = config_of(tmp_path, record={"traces": False})
    with Recorder(tmp_path, config, quiet()[0]) as record:
        record.traces(1, [rollout()])
    assert not (tmp_path / "traces").exists()


def test_console_says_step_evaluation_and_warning(tmp_path):
    console, text = quiet()
    with Recorder(tmp_path, config_of(tmp_path), console) as record:
        record.evaluation("before", evaluation(0.2))
        record.metrics(1, metrics(1) | {"logp_gap/mean": 0.2, "learning_rate": 6e-4})
        record.metrics(2, {"skipped": "no live row"})
    lines = text.getvalue().splitlines()
    assert lines[1].startswith("evaluation before:  pass@1 0.200  pass@4 0.400  majority@4 0.300  RSA step 0 0.200")
    step = lines[2]
    for part in ("step 1/3", "search 0.100", "aggregation 0.200", "live 3 dead 1", "250 tok/s", "lr 0.0006", "gap 0.2"):
        assert part in step
    assert "record.logp_gap_warning" in lines[3]
    assert lines[4] == "step 2/3  update skipped: no live row"


def evaluated(folder: Path, label: str, step: int, pass_1: float, rsa: list[float]) -> None:
    result = evaluation(pass_1) | {"step": step, "rsa": rsa}
    write_json(folder / f"eval_{label}.json", result)


def test_the_best_evaluation_is_the_runs_own_and_of_equals_the_first(tmp_path):
    with Recorder(tmp_path, config_of(tmp_path), quiet()[0]) as record:
        assert record.best() is None
        evaluated(tmp_path, "before", 0, 0.9, [0.9, 0.1])
        evaluated(tmp_path, "step_000002", 2, 0.2, [0.2, 0.7])
        evaluated(tmp_path, "after", 3, 0.3, [0.3, 0.7])
        evaluated(tmp_path, "again", 0, 1.0, [1.0, 1.0])  # of the user's
        assert record.best() == {"step": 2, "metric": "RSA step 1", "value": 0.7}


def test_rewinding_forgets_what_came_later_and_nothing_else(tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines) + lines[2][:30])  # killed while it wrote a fourth
    (run / "traces" / ".step_000004.parquet.tmp").touch()
    evaluated(run, "after", 3, 0.3, [])
    evaluated(run, "again", 9, 0.3, [])
    with Recorder(run, config_of(run), quiet()[0], resume=True) as record:
        assert record.recorded() == 3
        record.rewind(2)
        assert record.recorded() == 2
        record.metrics(3, metrics(3))
    assert (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    left = sorted(file.name for file in (run / "traces").iterdir())
    assert left == ["step_000001.parquet", "step_000002.parquet"]
    assert (run / "eval_again.json").exists() and not (run / "eval_after.json").exists()


def test_resuming_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--resume: .* holds no run"):
        Recorder(tmp_path, config_of(tmp_path), quiet()[0], resume=True)


def test_other_packages_and_threads_than_the_run_began_with_are_named(tmp_path):
    run = make_run(tmp_path)
    environment = json.loads((run / "environment.json").read_text())
    environment["packages"]["peft"] = "0.0.1"
    environment["torch_threads"] = 77
    write_json(run / "environment.json", environment)
    console, text = quiet()
    with Recorder(run, config_of(run), console, resume=True):
        pass
    assert "the run was begun with 0.0.1: it may not go on bit for bit" in text.getvalue()
    assert "the run was begun with 77: it may not go on bit for bit" in text.getvalue()
    assert text.getvalue().count("warning") == 2
    assert json.loads((run / "environment.json").read_text()) == environment
