"""What a grader is, which one a run uses, and when too many answers could not be graded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from math import isfinite
from typing import NamedTuple

from spiral_fast.config import Config, ConfigError
from spiral_fast.interrupts import result_of
from spiral_fast.trace import Problem

CORRECT, WRONG, COULD_NOT_GRADE = "correct", "wrong", "could_not_grade"
# Sources whose own check runs in a grading process like a user's reward: it takes what child/function.py says.
CHECKS = {"reasoning_gym": "spiral_fast.problems.reasoning_gym.check"}
Item = tuple[Problem, str, str]  # problem, text of the completion, its finish reason


class Verdict(NamedTuple):
    reward: float  # any number; graders of answers give 1.0 for "correct", else 0.0; 0.0 for "could_not_grade"
    verdict: str  # "correct" | "wrong" | "could_not_grade": wrong is the model's fault, could_not_grade is ours
    answer: str | None  # the extracted answer, for records and votes; None when the completion holds none
    reason: str = ""  # why it could not be graded


class Grader:
    """A context manager, usable from any thread; leaving it gives up the gradings in hand and ends every process."""

    restarts = 0  # grading processes that had to be replaced

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_) -> None:
        pass

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        """The verdict to come. Only the completion `text` is graded, never the prompt.

        What is equal for this grader (the same reference and answer, say) gives the same future for as long as anybody
        holds it, so that it is graded once.
        """
        raise NotImplementedError

    def grade(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict per item, in the items' order."""
        return [result_of(verdict) for verdict in [self.submit(*item) for item in items]]


def known(correct: bool, answer: str | None) -> Future[Verdict]:
    """The verdict of a grader that needs no process."""
    verdict: Future[Verdict] = Future()
    verdict.set_result(Verdict(float(correct), CORRECT if correct else WRONG, answer))
    return verdict


def make_grader(config: Config) -> Grader:
    """The grader `reward.kind` names; auto: the task's own checker, else exact for generated tasks and math for files.

    Raises ConfigError when the kind does not fit the task or its packages are missing.
    """
    source, kind = config.problems.source, config.reward.kind
    function = CHECKS.get(source) if kind == "auto" else config.reward.function
    if function:
        from spiral_fast.rewards.function import FunctionGrader

        return FunctionGrader(config.reward, function)
    if config.reward.correct_at != 1:
        raise ConfigError(
            f"reward.correct_at: {config.reward.correct_at} cannot be used: rewards of this kind are 0 or 1; remove it"
        )
    if kind == "auto":
        kind = "exact" if source in ("parts", "chain_sum") else "math"
    if kind == "math":
        if source == "parts":
            raise ConfigError("reward.kind: 'math' cannot grade the task parts, which has no boxed answers; use auto")
        from spiral_fast.rewards.math import MathGrader

        return MathGrader(config.reward)
    from spiral_fast.rewards.exact import ExactGrader, PartsGrader

    return PartsGrader() if source == "parts" else ExactGrader()


class GraderFailed(RuntimeError):
    """A grading process does not start."""


class NonFiniteReward(FloatingPointError):
    """A reward is NaN or infinite. `problems`: the ids of the problems concerned."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        named = ", ".join(map(repr, problems[:5]))
        super().__init__(f"the reward is not a finite number for the problems {named}{more}; mend reward.function")


class TooManyUngradable(RuntimeError):
    """More answers than `reward.max_ungradable` could not be graded; rewards can no longer be trusted."""


def check_finite(items: Sequence[Item], verdicts: Sequence[Verdict]) -> None:
    """Raise NonFiniteReward, naming the problems, when a reward is NaN or infinite."""
    problems = [item[0].id for item, verdict in zip(items, verdicts, strict=True) if not isfinite(verdict.reward)]
    if problems:
        raise NonFiniteReward(list(dict.fromkeys(problems)))


def check_ungradable(items: Sequence[Item], verdicts: Sequence[Verdict], config: Config) -> None:
    """Raise TooManyUngradable, naming the problems, when too large a share of a step's answers could not be graded."""
    failed = [
        (item[0].id, verdict.reason)
        for item, verdict in zip(items, verdicts, strict=True)
        if verdict.verdict == COULD_NOT_GRADE
    ]
    if not failed or len(failed) / len(items) <= config.reward.max_ungradable:
        return
    reasons = dict(reversed(failed))  # the first reason of each problem
    named = "; ".join(f"{problem!r} ({reasons[problem]})" for problem in list(dict.fromkeys(p for p, _ in failed))[:5])
    more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    raise TooManyUngradable(
        f"{len(failed)} of {len(items)} answers could not be graded, above reward.max_ungradable "
        f"{config.reward.max_ungradable}: problems {named}{more}; mend their reference answers or the reward "
        "function, or raise reward.timeout_s, reward.memory_mb or reward.max_ungradable"
    )
