"""The run's folder, filled while it runs. Killing the process at any instant loses at most the
record of the current step."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from spiral_fast.config import Config, ConfigError
from spiral_fast.record.console import Console, evaluation_line, step_line
from spiral_fast.record.environment import environment
from spiral_fast.record.files import (
    UNRECORDED,
    by_step,
    finite,
    holds_run,
    refuse_other_run,
    write_json,
    writing,
    written_aside,
)
from spiral_fast.record.headline import headline
from spiral_fast.record.run_folder import mapping_of, read_metrics
from spiral_fast.record.trace_store import write_traces
from spiral_fast.record.writers.writers import Writers
from spiral_fast.trace import ProblemRollout

OF_THE_MACHINE = ("processor", "torch_threads", "gpus")  # of environment.json: what decides how sums are rounded


class Recorder:
    """Writes config.yaml, environment.json, metrics.jsonl, traces/ and eval_<label>.json, hands the numbers on to the
    writers of the config, and speaks to the console.

    A context manager. With `resume` it goes on with the run that `run_dir` holds: call `rewind` first. Raises
    ConfigError when `run_dir` already holds a run (or, with `resume`, none) or another process writes one there, and
    CannotWrite when the disk is full.
    """

    def __init__(self, run_dir: str | Path, config: Config, console: Console | None = None, *, resume: bool = False):
        self.run_dir = Path(run_dir)
        self.config = config
        self.console = console or Console()
        if not resume:
            refuse_other_run(self.run_dir)
        elif not holds_run(self.run_dir):
            raise ConfigError(f"--resume: {str(run_dir)!r} holds no run (no config.yaml)")
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.run_dir / "metrics.jsonl").open("a")
        self._lock()
        if not resume:  # of a start that recorded nothing
            shutil.rmtree(self.run_dir / "checkpoints" / UNRECORDED, ignore_errors=True)
            (self.run_dir / "replay.json").unlink(missing_ok=True)
        with written_aside(self.run_dir / "config.yaml") as aside:
            aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        self._environment(resume)
        self.writers = Writers(self.run_dir, config, self.console.line, resume=resume)

    def __enter__(self) -> Recorder:
        self.console.__enter__()
        self.console.line(f"run {self.run_dir}")
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """One JSON line, flushed. Keys: docs/metrics.md; seconds stand under time/."""
        with writing(self.run_dir / "metrics.jsonl"):
            self._metrics.write(json.dumps({"step": step} | finite(metrics)) + "\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())  # a checkpoint on disk is never ahead of it
        self.writers.scalars(step, metrics)
        self.console.line(step_line(step, self.config.learner.steps, metrics))
        limit = self.config.record.logp_gap_warning
        if metrics.get("logp_gap/mean", 0.0) > limit:
            self.console.line(
                f"  warning: learner and engine log-probs differ by {metrics['logp_gap/mean']:.3g} on average "
                f"(record.logp_gap_warning {limit}): the engine may hold other weights than the learner"
            )

    def traces(self, step: int, rollouts: Iterable[ProblemRollout]) -> None:
        if self.config.record.traces:
            write_traces(self.run_dir / "traces", step, rollouts, self.config.batch.live_problems)

    def evaluation(self, label: str, result: dict[str, Any]) -> None:
        write_json(self.run_dir / f"eval_{label}.json", result)
        numbers = headline(result) | {name: result[name] for name in ("distinct_answers", "search_entropy")}
        self.writers.scalars(result["step"], {f"evaluation/{name}": value for name, value in numbers.items()})
        self.console.line(evaluation_line(label, result))

    def progress(self, phase: str) -> Callable[[int, int], None]:
        """A callback (done, total) that draws the phase's bar."""
        return self.console.progress(phase)

    def close(self) -> None:
        self.writers.close()
        self.console.__exit__()
        with writing(self.run_dir / "metrics.jsonl"):
            self._metrics.close()

    def recorded(self) -> int:
        """The last step whose line in metrics.jsonl is whole; 0 without any. Raises ConfigError for a damaged file."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        return rows[-1][0]["step"] if rows else 0

    def rewind(self, step: int) -> None:
        """Forget everything recorded after `step`: a resumed run records it again."""
        ends = (end for row, end in read_metrics(self.run_dir / "metrics.jsonl") if row["step"] <= step)
        end = max(ends, default=0)
        with writing(self.run_dir / "metrics.jsonl"):
            os.ftruncate(self._metrics.fileno(), end)
        self.writers.rewind(step)
        for aside in self.run_dir.glob("**/.*.tmp"):  # left by a killed process
            aside.unlink()
        for of, file in by_step(self.run_dir / "traces", ".parquet").items():
            if of > step:
                file.unlink()
        for label, result in self._evaluations().items():
            if result["step"] > step:
                (self.run_dir / f"eval_{label}.json").unlink()
            elif label == "after" and result["step"] < self.config.learner.steps:  # the run is made longer
                (self.run_dir / "eval_after.json").rename(self.run_dir / f"eval_step_{result['step']:06d}.json")

    def has_evaluation(self, label: str) -> bool:
        return (self.run_dir / f"eval_{label}.json").exists()

    def best(self) -> dict[str, Any] | None:
        """{"step", "metric", "value"} of the best evaluation: by its last RSA step, else pass@1; of equals the first.
        None without any."""
        found = []
        for result in self._evaluations().values():
            numbers = headline(result)
            metric = f"RSA step {len(result['rsa']) - 1}" if result["rsa"] else next(iter(numbers))
            found.append({"step": result["step"], "metric": metric, "value": numbers[metric]})
        return max(found, key=lambda best: (best["value"], -best["step"]), default=None)

    def _evaluations(self) -> dict[str, dict[str, Any]]:
        """The run's own, by label; a user may have put others beside them."""
        labels = (file.stem.removeprefix("eval_") for file in sorted(self.run_dir.glob("eval_*.json")))
        own = (label for label in labels if re.fullmatch(r"before|after|step_\d{6,}", label))
        return {
            label: mapping_of(self.run_dir / f"eval_{label}.json", json.loads, ("step", "pass_at_k", "rsa"))
            for label in own
        }

    def _environment(self, resume: bool) -> None:
        """environment.json of the run's begin stays; a resumed run on other packages or another machine says so."""
        file, now = self.run_dir / "environment.json", environment()
        if not resume or not file.exists():
            write_json(file, now)
            return
        old = mapping_of(file, json.loads, ["packages"])
        begun = old["packages"] | {name: old.get(name) for name in OF_THE_MACHINE}
        for name, value in (now["packages"] | {name: now[name] for name in OF_THE_MACHINE}).items():
            if begun.get(name) != value:
                then = f"the run was begun with {begun.get(name)}"
                self.console.line(f"  warning: {name} is {value}, {then}: it may not go on bit for bit")

    def _lock(self) -> None:
        """Until something is recorded, only this tells a second run that the folder is taken. Ends with the process."""
        try:
            fcntl.flock(self._metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._metrics.close()
            raise ConfigError(f"run_dir: {str(self.run_dir)!r} is being written by another process") from None
        except OSError:  # a file system without locks
            pass
