"""Dynamic sampling: draw problems until enough of them carry credit (paper §4, "effective batch size").

Problems are kept in the order they were drawn, never in the order they finished: that would favour short traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from spiral_fast.config import BatchConfig
from spiral_fast.trace import Problem, ProblemRollout


@dataclass
class LiveBatch:
    live: list[ProblemRollout] = field(default_factory=list)  # the step's |B| problems, in draw order
    dead: list[ProblemRollout] = field(default_factory=list)  # every credit exactly zero
    discarded: list[ProblemRollout] = field(default_factory=list)  # live, but drawn after the batch was full
    rounds: int = 0

    def add(self, rollout: ProblemRollout, live_problems: int) -> None:
        """The next problem in draw order, credited."""
        if not rollout.live:
            self.dead.append(rollout)
        elif len(self.live) < live_problems:
            self.live.append(rollout)
        else:
            self.discarded.append(rollout)

    def drawn(self) -> list[ProblemRollout]:
        """All problems of the step in draw order."""
        return sorted(self.live + self.dead + self.discarded, key=lambda rollout: rollout.draw)


def fill_live_batch(
    batch: LiveBatch,
    draws: Iterator[tuple[int, Problem]],
    score: Callable[[list[tuple[int, Problem]]], list[ProblemRollout]],
    settings: BatchConfig,
) -> None:
    """Roll out and credit rounds of problems into the empty `batch`: until `live_problems` live or `max_rounds` made.

    `score` samples, grades and credits the problems of one round and keeps their order. The batch may stay short, or
    empty: the step then goes on with what there is. When `score` raises, the batch holds the rounds before.
    """
    while len(batch.live) < settings.live_problems and batch.rounds < settings.max_rounds:
        batch.rounds += 1
        for rollout in score([next(draws) for _ in range(settings.round_problems or settings.live_problems)]):
            batch.add(rollout, settings.live_problems)
