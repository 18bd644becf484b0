from __future__ import annotations

import json
import resource
import shutil

import pytest

from spiral_fast.config import Config, ConfigError, RecordConfig
from spiral_fast.learner.learner import Learner
from spiral_fast.record.checkpoints import Checkpoints, Position
from spiral_fast.record.files import CannotWrite
from tests.learner.tiny import RAGGED, config, largest_difference, loaded, weights

NOWHERE = 10**6  # metrics.jsonl is never the shorter one here


def recorded_with(**settings) -> Config:
    return config().model_copy(update={"record": RecordConfig(**settings)})


def made(folder, steps: int, problems: str = "these", **settings) -> tuple[Checkpoints, list[str], Learner]:
    """A run of `steps` steps, saved after each; what it said, and its learner."""
    said: list[str] = []
    checkpoints = Checkpoints(folder, recorded_with(**settings), problems, said.append)
    learner = Learner(config(), loaded())
    checkpoints.save(Position(), learner)
    for step in range(1, steps + 1):
        learner.step(RAGGED)
        checkpoints.save(Position(step, 3 * step, 0), learner)
    return checkpoints, said, learner


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_restored_with_its_position(tmp_path):
    checkpoints, said, learner = made(tmp_path, 3)
    fresh = Learner(config(), loaded(seed=0))
    assert checkpoints.restore(fresh, NOWHERE) == Position(3, 9, 0)
    assert largest_difference(weights(fresh), weights(learner)) == 0 and fresh.policy_version == 3
    assert said == [f"resumed from {tmp_path / 'step_000003'}"]


def test_without_any_the_run_starts_anew_unless_steps_are_recorded(tmp_path):
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path / "none", config(), "these", said.append)
    assert checkpoints.restore(None, 0) is None
    assert said == ["no checkpoint yet: the run starts anew"]
    with pytest.raises(ConfigError, match=r"^--resume: .*none holds no whole checkpoint, but 3 steps are recorded"):
        checkpoints.restore(None, 3)


def change(folder) -> str:
    file = folder / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return "adapter_model.safetensors has changed since it was written"


def cut(folder) -> str:
    file = folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return "optimizer.safetensors has changed since it was written"


def lose(folder) -> str:
    (folder / "learner.json").unlink()
    return "learner.json is missing"


def add(folder) -> str:
    (folder / "pickle.bin").write_text("x")
    return "pickle.bin does not belong to it"


def edit_position(folder) -> str:
    (folder / "run.json").write_text((folder / "run.json").read_text().replace("9", "8"))
    return "run.json has changed since it was written"


def lose_digests(folder) -> str:
    (folder / "digests.json").unlink()
    return "digests.json is missing"


def break_digests(folder) -> str:
    (folder / "digests.json").write_text("[1")
    return "digests.json cannot be read"


def list_digests(folder) -> str:
    (folder / "digests.json").write_text("[]")
    return "digests.json is damaged"


def empty(folder) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "digests.json is missing"


@pytest.mark.parametrize(
    "damage", [change, cut, lose, add, edit_position, lose_digests, break_digests, list_digests, empty]
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, damage):
    checkpoints, said, _ = made(tmp_path, 3)
    flaw = damage(tmp_path / "step_000003")
    assert checkpoints.restore(Learner(config(), loaded()), NOWHERE) == Position(2, 6, 0)
    assert said[0].startswith(f"checkpoint step_000003 is passed over: {flaw}") and "\n" not in said[0]
    assert said[1] == f"resumed from {tmp_path / 'step_000002'}"


def test_metrics_that_end_before_a_whole_checkpoint_cost_none(tmp_path):
    checkpoints, said, _ = made(tmp_path, 3)
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics.jsonl ends at step 2, before .*step_000003: restore the file"):
        checkpoints.restore(Learner(config(), loaded()), 2)
    assert said == [] and names(tmp_path) == before
    shutil.rmtree(tmp_path / "step_000003")
    assert checkpoints.restore(Learner(config(), loaded()), 2) == Position(2, 6, 0)


def test_copies_that_a_user_made_are_left_alone(tmp_path):
    checkpoints, said, learner = made(tmp_path, 2, keep_last=1)
    mine = [tmp_path / "step_000002_good", tmp_path / "step_000009 copy", tmp_path / "step_9"]
    for folder in mine:
        shutil.copytree(tmp_path / "step_000002", folder)
    checkpoints.save(Position(3, 9, 0), learner)
    assert names(tmp_path) == sorted(["step_000000", "step_000003", *(folder.name for folder in mine)])
    assert checkpoints.restore(Learner(config(), loaded()), NOWHERE) == Position(3, 9, 0)


def test_other_problems_are_refused(tmp_path):
    made(tmp_path, 1)
    other = Checkpoints(tmp_path, config(), "those", lambda line: None)
    with pytest.raises(ConfigError, match=r"^--resume: the problems are not those"):
        other.restore(Learner(config(), loaded()), NOWHERE)


def test_kept_are_the_last_ones_every_nth_and_the_best(tmp_path):
    checkpoints, _, learner = made(tmp_path, 0, keep_last=2, checkpoint_every=4)
    for step in range(1, 12):
        checkpoints.save(Position(step, 0, 0), learner)
        if step == 5:
            checkpoints.mark_best({"step": 5, "metric": "pass@1", "value": 0.5})
    kept = [f"step_{step:06d}" for step in (0, 4, 5, 8, 10, 11)]
    assert names(tmp_path) == ["best.json", *kept]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 5


def test_a_streak_of_failed_steps_pushes_no_good_checkpoint_out(tmp_path):
    checkpoints, _, learner = made(tmp_path, 3, keep_last=2)
    for failed in (1, 2, 3):
        checkpoints.save(Position(3 + failed, 0, failed), learner)
        assert names(tmp_path)[-3:] == [f"step_{step:06d}" for step in (2, 3, 3 + failed)]
    checkpoints.save(Position(7, 0, 0), learner)
    assert names(tmp_path)[-2:] == ["step_000006", "step_000007"] and "step_000003" not in names(tmp_path)


def test_what_a_killed_process_left_aside_goes(tmp_path):
    (tmp_path / ".step_000002.aside").mkdir(parents=True)
    (tmp_path / ".step_000002.aside" / "junk").touch()
    made(tmp_path, 3, keep_last=9)
    assert names(tmp_path) == [f"step_{step:06d}" for step in range(4)]
    assert "junk" not in names(tmp_path / "step_000002")


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path):
    checkpoints, _, learner = made(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(CannotWrite, match=r"step_000002: cannot be written \(.*File too large") as error:
            checkpoints.save(Position(2), learner)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step_000000", "step_000001"]
    assert checkpoints.restore(Learner(config(), loaded()), NOWHERE).step == 1
