"""Completions whose verdict is known: the reference answer in the format the prompt asks for, and a changed one."""

from __future__ import annotations

import re

from spiral_fast.problems import parts
from spiral_fast.trace import Problem

OTHER = "987654321"  # in place of an answer that is no plain number


def right_answer(problem: Problem, source: str) -> str:
    """source: `problems.source` of the config."""
    if source == "parts":
        return _parts_trace(problem, right=True)
    return f"\\boxed{{{problem.answer}}}"


def wrong_answer(problem: Problem, source: str) -> str:
    """A number moved by its own size, beyond any tolerance; else another number altogether. Of `parts`, one part that
    misses its target."""
    if source == "parts":
        return _parts_trace(problem, right=False)
    changed = OTHER
    if re.fullmatch(r"\s*[+-]?\d{1,1000}\s*", problem.answer):
        number = int(problem.answer)
        changed = str(number + max(1, abs(number)))
    return f"\\boxed{{{changed}}}"


def _parts_trace(problem: Problem, right: bool) -> str:
    words: list[str] = []
    for label, part in zip(parts.LABELS, map(tuple, problem.data["parts"]), strict=True):
        wanted = right or label != parts.LABELS[-1]
        choice = next(choice for choice in parts.CHOICES if parts.solves(part, choice) == wanted)
        words += parts.attempt(label, part, choice)
    return " ".join(words)
