r"""Rewards without a solver: the same string in the last \boxed{}, and the task `parts` with its own checker."""

from __future__ import annotations

from collections.abc import Sequence

from spiral_fast.rewards.boxed import boxed_answer, same_spacing
from spiral_fast.rewards.grader import CORRECT, WRONG, Item, Verdict


class _InProcess:
    """A grader that needs no process of its own."""

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


class ExactGrader(_InProcess):
    """Correct iff the last box holds the reference answer, white space aside. The finish reason plays no part."""

    def grade(self, items: Sequence[Item]) -> list[Verdict]:
        verdicts = []
        for problem, text, _ in items:
            answer = self.answer(text)
            correct = answer is not None and answer == same_spacing(problem.answer)
            verdicts.append(Verdict(float(correct), CORRECT if correct else WRONG, answer))
        return verdicts

    def answer(self, text: str) -> str | None:
        return boxed_answer(text)


class PartsGrader(_InProcess):
    """The checker of the task `parts`: every part hits its target, in strict format, ended by an end-of-sequence id."""

    def grade(self, items: Sequence[Item]) -> list[Verdict]:
        from spiral_fast.problems import parts

        verdicts = []
        for problem, text, finish_reason in items:
            correct = parts.check(problem, text, finish_reason)
            verdicts.append(Verdict(float(correct), CORRECT if correct else WRONG, self.answer(text)))
        return verdicts

    def answer(self, text: str) -> str | None:
        from spiral_fast.problems import parts

        return parts.answer(text)
