"""Checkpoints of a run: each written aside, sealed by digests and then renamed; the newest whole one is found again.

A folder checkpoints/step_N holds what the learner saves (PEFT adapters, the optimiser's moments, its counters),
run.json (a Position, a digest of the problems, what must stay of the config) and digests.json. There is no other state:
every random stream of a run derives from its seed and the number of the draw or step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from spiral_fast import ranks
from spiral_fast.config import Config, ConfigError
from spiral_fast.interrupts import interrupts_held
from spiral_fast.record.files import by_step, sync, write_json, writing
from spiral_fast.resume import fixed_values

if TYPE_CHECKING:
    from spiral_fast.learner.learner import Learner

DIGESTS = "digests.json"  # sha256 of every other file in the folder


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps."""

    step: int = 0  # steps recorded
    next_draw: int = 0  # of the run's order of problems
    failed_in_a_row: int = 0  # last steps, all of them skipped for numbers that are not finite


class Checkpoints:
    """The folder checkpoints/ of one run. `problems` is a digest of all problems: another data set has other draws.
    `say` prints one line."""

    def __init__(self, folder: Path, config: Config, problems: str, say: Callable[[str], None]):
        self.folder, self.config, self.problems, self.say = folder, config, problems, say
        self.best_step: int | None = None

    def save(self, position: Position, learner: Learner) -> None:
        """Write the checkpoint of `position`, then remove those that need not be kept. Raises CannotWrite on a full
        disk: older checkpoints are whole then. Of several ranks the first alone writes, and waits for no other."""
        if ranks.rank():
            return
        target = self.path(position.step)
        aside = target.with_name(f".{target.name}.aside")
        with interrupts_held(), writing(target):
            shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed here
            aside.mkdir(parents=True)
            try:
                learner.save(aside)
                content = asdict(position) | {"problems": self.problems, "config": fixed_values(self.config)}
                (aside / "run.json").write_text(json.dumps(content) + "\n")
                (aside / DIGESTS).write_text(json.dumps(_digests(aside), indent=1) + "\n")
                for file in [*aside.rglob("*"), aside]:
                    sync(file)
                shutil.rmtree(target, ignore_errors=True)  # one that a resumed run found damaged
                aside.rename(target)
                sync(self.folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._remove_old(position)

    def restore(self, learner: Learner, recorded: int) -> Position | None:
        """Put the newest whole checkpoint into the learner and say which; damaged ones are named and passed over. None
        when nothing was recorded either: the run starts anew. Of several ranks the first looks for it, all read it.

        Raises ConfigError, before anything is changed, when that would throw recorded steps or whole checkpoints away
        (metrics.jsonl ends at step `recorded`), and when the problems differ from those of the run."""
        found = ranks.from_first(self._newest, recorded)
        if found is None:
            self.say("no checkpoint yet: the run starts anew")
            return None
        position, folder = found
        learner.restore(folder)
        self.say(f"resumed from {folder}")
        return position

    def _newest(self, recorded: int) -> tuple[Position, Path] | None:
        for folder in reversed(by_step(self.folder).values()):
            if flaw := flaw_of(folder):
                self.say(f"checkpoint {folder.name} is passed over: {flaw}")
                continue
            content = json.loads((folder / "run.json").read_text())
            position = Position(**{field.name: content[field.name] for field in fields(Position)})
            if position.step > recorded:
                raise ConfigError(
                    f"--resume: {self.folder.parent / 'metrics.jsonl'} ends at step {recorded}, before {folder}: "
                    "restore the file, or delete newer checkpoints to make their steps again"
                )
            if content["problems"] != self.problems:
                raise ConfigError(f"--resume: the problems are not those that {folder} was made with; restore the data")
            for aside in self.folder.glob(".step_*.aside"):  # left by a killed process
                shutil.rmtree(aside)
            return position, folder
        if recorded:
            raise ConfigError(
                f"--resume: {self.folder} holds no whole checkpoint, but {recorded} steps are recorded: restore one, "
                "or begin a new run in another folder"
            )
        return None

    def mark_best(self, best: dict | None) -> None:
        """Keep the checkpoint of `best` (Recorder.best) and say in best.json which it is."""
        if best is None:
            return
        self.best_step = best["step"]
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "best.json", best)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _remove_old(self, position: Position) -> None:
        """Kept: the last `keep_last`, every `checkpoint_every`-th step, and the best.

        Steps that fail one after the other have one adapter, perhaps a diverged one: of theirs only the newest is kept,
        and it pushes none from before them out.
        """
        settings, folders = self.config.record, by_step(self.folder)
        failing = [step for step in folders if step > position.step - position.failed_in_a_row]
        before = [step for step in folders if step not in failing]
        for step in before[: -settings.keep_last] + failing[:-1]:
            if step % settings.checkpoint_every and step != self.best_step:
                folder = folders[step]
                gone = folder.with_name(f".{folder.name}.aside")
                folder.rename(gone)  # never half a checkpoint under its name
                shutil.rmtree(gone)


def flaw_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file is as it was written."""
    try:
        expected = json.loads((folder / DIGESTS).read_text())
        found = _digests(folder)
    except FileNotFoundError:
        return f"{DIGESTS} is missing"
    except (OSError, ValueError) as error:
        return f"{DIGESTS} cannot be read ({error})"
    if not isinstance(expected, dict):
        return f"{DIGESTS} is damaged"
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} does not belong to it"
        if expected[name] != found[name]:
            return f"{name} has changed since it was written"
    return None


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name != DIGESTS and file.is_file():
            with file.open("rb") as content:
                digests[name] = hashlib.file_digest(content, "sha256").hexdigest()
    return digests
