r"""Rewards without a process: the same string in the last \boxed{}, and the task `parts` with its own checker."""

from __future__ import annotations

from concurrent.futures import Future

from spiral_fast.rewards.boxed import boxed_answer, same_spacing
from spiral_fast.rewards.grader import CORRECT, WRONG, Grader, Verdict
from spiral_fast.trace import Problem


def _known(correct: bool, answer: str | None) -> Future[Verdict]:
    verdict: Future[Verdict] = Future()
    verdict.set_result(Verdict(float(correct), CORRECT if correct else WRONG, answer))
    return verdict


class ExactGrader(Grader):
    """Correct iff the last box holds the reference answer, white space aside. The finish reason plays no part."""

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        answer = self.answer(text)
        return _known(answer is not None and answer == same_spacing(problem.answer), answer)

    def answer(self, text: str) -> str | None:
        return boxed_answer(text)


class PartsGrader(Grader):
    """The checker of the task `parts`: every part hits its target, in strict format, ended by an end-of-sequence id."""

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        from spiral_fast.problems import parts

        return _known(parts.check(problem, text, finish_reason), self.answer(text))

    def answer(self, text: str) -> str | None:
        from spiral_fast.problems import parts

        return parts.answer(text)
