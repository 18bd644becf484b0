"""Reward round trip: the reference answer, written as the prompt asks, is graded right, and a changed one wrong."""

from __future__ import annotations

import math
import random
import time

from spiral_fast.rewards import make_grader
from spiral_fast.rewards.grader import CORRECT, WRONG, Verdict
from spiral_fast.trace import Problem
from spiral_fast.verify.known_answers import right_answer, wrong_answer
from spiral_fast.verify.result import FAIL, PASS, Result
from spiral_fast.verify.subject import Subject

MAX_PROBLEMS = 256
SECONDS = 20.0  # after which no further problem is graded
ROUND = 16  # problems graded together


def rewards_round_trip(subject: Subject) -> Result:
    """Problems of both sets, at random; each completion goes through the tokenizer as a sampled one does."""
    source = subject.config.problems.source
    known = [*subject.problems.train, *subject.problems.eval]
    problems = random.Random(0).sample(known, min(MAX_PROBLEMS, len(known)))
    failures: list[str] = []
    n_graded, start = 0, time.monotonic()
    with make_grader(subject.config) as grader:
        while n_graded < len(problems) and (not n_graded or time.monotonic() - start < SECONDS):
            part = problems[n_graded : n_graded + ROUND]
            texts = [(problem, write(problem, source)) for problem in part for write in (right_answer, wrong_answer)]
            verdicts = grader.grade([(problem, _through_tokens(subject, text), "stop") for problem, text in texts])
            for problem, right, wrong in zip(part, verdicts[::2], verdicts[1::2], strict=True):
                failures += _failure(problem, right, wrong)
            n_graded += len(part)
    of = f"{n_graded} of {len(known):,} problems"
    values = {"failures": len(failures), "problems": n_graded}
    if failures:
        return Result(FAIL, f"{len(failures)} of {n_graded} wrong", "0", f"{of}; {'; '.join(failures[:3])}", values)
    return Result(PASS, f"0 of {n_graded} wrong", "0", of, values)


def _failure(problem: Problem, right: Verdict, wrong: Verdict) -> list[str]:
    """What is wrong with the two verdicts, at most one line."""
    if not (math.isfinite(right.reward) and math.isfinite(wrong.reward)):
        return [f"{problem.id!r}: rewards {right.reward} and {wrong.reward}"]
    for verdict, wanted, name in ((right, CORRECT, "reference answer"), (wrong, WRONG, "changed answer to")):
        if verdict.verdict != wanted:
            reason = f" ({verdict.reason})" if verdict.reason else ""
            return [f"{problem.id!r}: the {name} {problem.answer[:40]!r} is graded {verdict.verdict}{reason}"]
    return []


def _through_tokens(subject: Subject, text: str) -> str:
    return subject.prompts.decode(subject.prompts.completion(text))
