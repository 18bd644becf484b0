"""Rank 0 alone writes the run's folder and speaks to the console."""

from __future__ import annotations

from typing import Any

from spiral_fast import ranks
from spiral_fast.config import Config
from spiral_fast.record.recorder import Recorder


def recording(config: Config, *, resume: bool) -> Recorder | Silent:
    """A Recorder on rank 0, Silent on the others."""
    return Silent() if ranks.rank() else Recorder(config.run_dir, config, resume=resume)


class Silent:
    """Takes what a Recorder takes, and writes and says nothing."""

    def __init__(self):
        self.console = self

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def progress(self, phase: str) -> None:
        """No callback: who reports progress takes None for nobody."""

    def metrics(self, step: int, metrics: dict[str, Any]) -> None:
        pass

    def traces(self, step: int, rollouts: Any) -> None:
        pass

    def evaluation(self, label: str, result: dict[str, Any]) -> None:
        pass

    def recorded(self) -> int:
        return 0

    def rewind(self, step: int) -> None:
        pass

    def has_evaluation(self, label: str) -> bool:
        return False

    def best(self) -> None:
        return None
