"""The built-in task `parts`: a problem is three independent parts, so that combining traces can beat every single one.

A part is three integers a b c in 1..9 and a target T. Choose two operations out of {+, -, skip}: the running value
starts at a, the first operation puts b on it, the second c; the part is right when it ends at T. Always solvable.

    question  `fixed A a b c T B a b c T C a b c T`            (or `variable ...`)
    trace     `A op v op v mark B op v op v mark C op v op v mark`, then end of sequence

v is the running value after each operation, mark is Y when it equals T, else N: both are the trace's claim and are not
graded. In the variable variant a part may be attempted any number of times (its label again); the last attempt counts.
"""

from __future__ import annotations

import random
from itertools import product

from spiral_fast.trace import Problem

LABELS = ("A", "B", "C")
OPERATIONS = ("+", "-", "skip")
CHOICES = tuple(product(OPERATIONS, repeat=2))  # the nine ways to answer a part
MARKS = ("Y", "N")
NUMBERS = tuple(str(value) for value in range(1 - 9 - 9, 9 + 9 + 9 + 1))
FIXED, VARIABLE = "fixed", "variable"

Part = tuple[int, int, int, int]  # a, b, c, target
Choice = tuple[str, str]


def values(part: Part, choice: Choice) -> tuple[int, int]:
    """The running value after the first and after the second operation."""
    a, b, c, _ = part
    first = _apply(a, choice[0], b)
    return first, _apply(first, choice[1], c)


def _apply(value: int, operation: str, operand: int) -> int:
    return value + {"+": operand, "-": -operand, "skip": 0}[operation]


def solves(part: Part, choice: Choice) -> bool:
    return values(part, choice)[1] == part[3]


def solutions(part: Part) -> list[Choice]:
    """All choices that end at the target (at least one)."""
    return [choice for choice in CHOICES if solves(part, choice)]


def random_part(rng: random.Random) -> Part:
    """Numbers and choice uniform; the target is where the choice ends."""
    a, b, c = (rng.randint(1, 9) for _ in range(3))
    return (a, b, c, values((a, b, c, 0), rng.choice(CHOICES))[1])


def attempt(label: str, part: Part, choice: Choice) -> list[str]:
    """The six tokens of one honest attempt: values and mark are true."""
    first, last = values(part, choice)
    return [label, choice[0], str(first), choice[1], str(last), MARKS[0] if last == part[3] else MARKS[1]]


def make_problem(id: str, parts: tuple[Part, ...], variable_length: bool) -> Problem:
    words = [VARIABLE if variable_length else FIXED]
    for label, part in zip(LABELS, parts, strict=True):
        words += [label, *map(str, part)]
    reference = " | ".join(" ".join(solutions(part)[0]) for part in parts)
    data = {"parts": [list(part) for part in parts], "variable_length": variable_length}
    return Problem(id=id, question=" ".join(words), answer=reference, data=data)


def problem_stream(seed: int | str, variable_length: bool, prefix: str):
    """Endless problems of one seed, no question twice. Ids are `<prefix>-<n>`."""
    rng = random.Random(f"parts/{seed}")
    seen = set()
    while True:
        problem = make_problem(f"{prefix}-{len(seen)}", tuple(random_part(rng) for _ in LABELS), variable_length)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def parse(text: str) -> list[list[Choice]] | None:
    """The attempted choices of each part, in order; None when the text as a whole is not a trace."""
    words = text.split()
    if len(words) % 6:
        return None
    attempts: list[list[Choice]] = [[] for _ in LABELS]
    current = 0  # index of the part now attempted; the labels may repeat or move on by one, never go back or jump
    for start in range(0, len(words), 6):
        label, first, value, second, last, mark = words[start : start + 6]
        if start and current + 1 < len(LABELS) and label == LABELS[current + 1]:
            current += 1
        well_formed = (
            label == LABELS[current]
            and first in OPERATIONS
            and second in OPERATIONS
            and value in NUMBERS
            and last in NUMBERS
            and mark in MARKS
        )
        if not well_formed:
            return None
        attempts[current].append((first, second))
    return attempts if all(attempts) else None


def check(problem: Problem, text: str, finish_reason: str) -> bool:
    """Right when the trace ended by itself, in its variant's format, and each part's last attempt hits its target."""
    attempts = parse(text) if finish_reason == "stop" else None
    if attempts is None:
        return False
    if not problem.data["variable_length"] and any(len(tried) > 1 for tried in attempts):
        return False
    return all(solves(tuple(part), tried[-1]) for part, tried in zip(problem.data["parts"], attempts, strict=True))


def answer(text: str) -> str | None:
    """The six operations that count, `op op | op op | op op`, for majority voting; None for a text that is no trace."""
    attempts = parse(text)
    return None if attempts is None else " | ".join(" ".join(tried[-1]) for tried in attempts)
