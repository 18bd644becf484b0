"""The rewards of one round, graded while its other traces are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from spiral_fast.config import Config
from spiral_fast.rewards.grader import Grader, Verdict, check_finite, check_ungradable
from spiral_fast.trace import Problem, ProblemRollout, Trace


class Grading:
    """Within it, `submit` each trace when it is complete (`on_trace` of `roll_out`), `finish` when all are.

    The result depends neither on when nor on whether a trace was submitted: `finish` grades what is left.
    """

    def __init__(self, grader: Grader, config: Config):
        self.grader, self.config = grader, config
        self._verdicts: list[Future[Verdict]] = []  # held, so that equal answers are graded once

    def submit(self, problem: Problem, trace: Trace) -> None:
        """Begin to grade the completion of one trace; returns at once."""
        self._verdicts.append(self.grader.submit(problem, trace.text, trace.finish_reason))

    def finish(self, rollouts: Sequence[ProblemRollout]) -> None:
        """Wait, then fill reward, verdict and answer of every trace.

        Raises what a grading raised, and, with the traces filled, NonFiniteReward or TooManyUngradable.
        """
        traces = [(rollout.problem, trace) for rollout in rollouts for trace in rollout.traces()]
        items = [(problem, trace.text, trace.finish_reason) for problem, trace in traces]
        verdicts = self.grader.grade(items)
        self._verdicts = []
        for (_, trace), verdict in zip(traces, verdicts, strict=True):
            trace.reward, trace.verdict, trace.answer = verdict.reward, verdict.verdict, verdict.answer
        check_finite(items, verdicts)
        check_ungradable(items, verdicts, self.config)

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *_) -> None:
        """Forget what was submitted and not finished; what has not begun is never graded."""
        for verdict in self._verdicts:
            verdict.cancel()
        self._verdicts = []
