"""Wall time by phase of one step, seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`time/<phase>` of each phase and `time/step` since the start."""
        return {f"time/{phase}": s for phase, s in self.seconds.items()} | {
            "time/step": time.perf_counter() - self.started
        }
