"""The rewards of one round, graded while its other traces are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from spiral_fast.config import Config
from spiral_fast.rewards.grader import Grader, Item, Verdict, check_finite, check_ungradable
from spiral_fast.trace import Problem, ProblemRollout, Trace


class Grading:
    """Within it, `submit` each trace when it is complete (`on_trace` of `roll_out`), `finish` when all are.

    The result depends neither on when nor on whether a trace was submitted: `finish` grades what is left.
    """

    def __init__(self, grader: Grader):
        self.grader = grader
        self._verdicts: list[Future[Verdict]] = []  # held, so that equal answers are graded once

    def submit(self, problem: Problem, trace: Trace) -> None:
        """Begin to grade the completion of one trace; returns at once."""
        self._verdicts.append(self.grader.submit(problem, trace.text, trace.finish_reason))

    def finish(self, rollouts: Sequence[ProblemRollout]) -> list[list[Verdict]]:
        """Wait, then fill reward, verdict and answer of every trace. Returns the verdicts of each problem's traces.

        Raises what a grading raised, and, with the traces filled, NonFiniteReward.
        """
        traces = [trace for rollout in rollouts for trace in rollout.traces()]
        items = items_of(rollouts)
        verdicts = self.grader.grade(items)
        self._verdicts = []
        for trace, verdict in zip(traces, verdicts, strict=True):
            trace.reward, trace.verdict, trace.answer = verdict.reward, verdict.verdict, verdict.answer
        check_finite(items, verdicts)
        following = iter(verdicts)
        return [[next(following) for _ in rollout.traces()] for rollout in rollouts]

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *_) -> None:
        """Forget what was submitted and not finished; what has not begun is never graded."""
        for verdict in self._verdicts:
            verdict.cancel()
        self._verdicts = []


def check_graded(graded: Sequence[tuple[ProblemRollout, list[Verdict]]], config: Config) -> None:
    """Raise TooManyUngradable by the answers of all these problems, with what `finish` returned of each."""
    verdicts = [verdict for _, of_problem in graded for verdict in of_problem]
    check_ungradable(items_of([rollout for rollout, _ in graded]), verdicts, config)


def items_of(rollouts: Sequence[ProblemRollout]) -> list[Item]:
    return [(rollout.problem, t.text, t.finish_reason) for rollout in rollouts for t in rollout.traces()]
