r"""Rewards without a process: the same string in the last \boxed{}, and the task `parts` with its own checker."""

from __future__ import annotations

from concurrent.futures import Future

from spiral_fast.rewards.boxed import boxed_answer, same_spacing
from spiral_fast.rewards.grader import Grader, Verdict, known
from spiral_fast.trace import Problem


class ExactGrader(Grader):
    """Correct iff the last box holds the reference answer, white space aside. The finish reason plays no part."""

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        answer = boxed_answer(text)
        return known(answer is not None and answer == same_spacing(problem.answer), answer)


class PartsGrader(Grader):
    """The checker of the task `parts`: every part hits its target, in strict format, ended by an end-of-sequence id."""

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        from spiral_fast.problems import parts

        return known(parts.check(problem, text, finish_reason), parts.answer(text))
