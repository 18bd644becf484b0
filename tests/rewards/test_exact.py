from __future__ import annotations

import pytest

from spiral_fast.problems.parts import attempt, make_problem
from spiral_fast.rewards import Verdict
from spiral_fast.rewards.exact import ExactGrader, PartsGrader
from spiral_fast.trace import Problem


@pytest.mark.parametrize(
    ("reference", "text", "verdict"),
    [
        ("12", "\\boxed{12}", Verdict(1.0, "correct", "12")),
        ("12", "\\boxed{ 12 }", Verdict(1.0, "correct", "12")),
        ("a b", "\\boxed{a \n  b}", Verdict(1.0, "correct", "a b")),
        ("12", "\\boxed{12.0}", Verdict(0.0, "wrong", "12.0")),
        ("12", "\\boxed{12} or \\boxed{13}", Verdict(0.0, "wrong", "13")),
        ("12", "12", Verdict(0.0, "wrong", None)),
        ("12", "\\boxed{}", Verdict(0.0, "wrong", None)),
        ("12", "\\boxed{12} \\boxed{ \n}", Verdict(0.0, "wrong", None)),
    ],
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_same_string_in_the_last_box(reference, text, verdict, finish_reason):
    with ExactGrader() as grader:
        assert grader.grade([(Problem("p", "q", reference), text, finish_reason)]) == [verdict]


def test_parts_by_its_own_checker():
    parts = ((1, 2, 3, 6), (1, 1, 1, 1), (9, 1, 1, 7))
    problem = make_problem("p", parts, variable_length=False)

    def trace(last: tuple[str, str]) -> str:
        choices = (("+", "+"), ("+", "-"), last)
        return " ".join(word for row in zip("ABC", parts, choices, strict=True) for word in attempt(*row))

    right, missed = trace(("-", "-")), trace(("-", "+"))
    items = [(problem, right, "stop"), (problem, missed, "stop"), (problem, right, "length"), (problem, "A +", "stop")]
    assert PartsGrader().grade(items) == [
        Verdict(1.0, "correct", "+ + | + - | - -"),
        Verdict(0.0, "wrong", "+ + | + - | - +"),
        Verdict(0.0, "wrong", "+ + | + - | - -"),  # no end of sequence
        Verdict(0.0, "wrong", None),
    ]
