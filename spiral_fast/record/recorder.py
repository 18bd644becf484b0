"""The run's folder, filled while it runs. Killing the process at any instant loses at most the
record of the current step."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from spiral_fast.config import Config, ConfigError
from spiral_fast.record.console import Console, evaluation_line, step_line
from spiral_fast.record.environment import environment
from spiral_fast.record.files import UNRECORDED, finite, refuse_other_run, write_json, writing, written_aside
from spiral_fast.record.trace_store import write_traces
from spiral_fast.trace import ProblemRollout


class Recorder:
    """Writes config.yaml, environment.json, metrics.jsonl, traces/ and eval_<label>.json, and speaks to the console.

    A context manager. Raises ConfigError when `run_dir` already holds a run or another process writes one there, and
    CannotWrite when the disk is full.
    """

    def __init__(self, run_dir: str | Path, config: Config, console: Console | None = None):
        self.run_dir = Path(run_dir)
        self.config = config
        self.console = console or Console()
        refuse_other_run(self.run_dir)
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.run_dir / "metrics.jsonl").open("a")
        self._lock()
        shutil.rmtree(self.run_dir / "checkpoints" / UNRECORDED, ignore_errors=True)  # of a start that recorded nothing
        with written_aside(self.run_dir / "config.yaml") as aside:
            aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        write_json(self.run_dir / "environment.json", environment())

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
        self.console.line(step_line(step, self.config.learner.steps, metrics))
        limit = self.config.record.logp_gap_warning
        if metrics.get("logp_gap/mean", 0.0) > limit:
            self.console.line(
                f"  warning: learner and engine log-probs differ by {metrics['logp_gap/mean']:.3g} on average "
                f"(record.logp_gap_warning {limit}): the engine may hold other weights than the learner"
            )

    def traces(self, step: int, rollouts: Iterable[ProblemRollout]) -> None:
        if self.config.record.traces:
            write_traces(self.run_dir / "traces", step, rollouts)

    def evaluation(self, label: str, result: dict[str, Any]) -> None:
        write_json(self.run_dir / f"eval_{label}.json", result)
        self.console.line(evaluation_line(label, result))

    def progress(self, phase: str) -> Callable[[int, int], None]:
        """A callback (done, total) that draws the phase's bar."""
        return self.console.progress(phase)

    def close(self) -> None:
        self.console.__exit__()
        with writing(self.run_dir / "metrics.jsonl"):
            self._metrics.close()

    def _lock(self) -> None:
        """Until something is recorded, only this tells a second run that the folder is taken. Ends with the process."""
        try:
            fcntl.flock(self._metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._metrics.close()
            raise ConfigError(
                f"run_dir: {str(self.run_dir)!r} is being written by another run; name another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
