from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from spiral_fast.config import ConfigError
from spiral_fast.credit.diversity import distinct_answers, load_diversity, set_diversities
from spiral_fast.trace import SEARCH, Problem, ProblemRollout, Trace, TraceKey


def share_of_long_texts(answers, texts):
    """Named by its dotted name below."""
    return sum(len(text) > 3 for text in texts) / len(texts)


def rollout(answers, texts, sets) -> ProblemRollout:
    traces = [
        Trace(TraceKey("p", SEARCH, -1, i), [1], [2], np.zeros(1, np.float32), "stop", 0, text, answer=answer)
        for i, (answer, text) in enumerate(zip(answers, texts, strict=True))
    ]
    return ProblemRollout(Problem("p", "q", "a"), 0, traces, np.array(sets), [[]] * len(sets))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["4", "4", "4"], Fraction(1, 3)),
        (["4", "5", "6"], 1),
        (["4", None, None], Fraction(1, 3)),  # no answer adds nothing
        ([None, None, None], 0),
        (["", "4", None], Fraction(2, 3)),  # an empty answer is one
    ],
)
def test_distinct_answers(answers, expected):
    assert distinct_answers(answers, [""] * len(answers)) == expected


def test_each_set_is_given_its_own_answers_and_texts():
    problem = rollout(["4", "4", "5", None], ["a", "long", "longer", ""], [[0, 1], [1, 2], [3, 0]])
    assert set_diversities(problem, distinct_answers) == [Fraction(1, 2), 1, Fraction(1, 2)]
    by_name = load_diversity(f"{__name__}.share_of_long_texts")
    assert set_diversities(problem, by_name) == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    "name",
    ["distinct", "math.gcd.d", "no_such_module.d", "math.no_such_function", "math.pi", "", ".", "a..b", "no_file.py:d"],
)
def test_a_name_that_is_no_function_is_one_line(name):
    with pytest.raises(ConfigError, match="^credit.diversity: ") as error:
        load_diversity(name)
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", 1j])
def test_what_is_no_finite_number_is_refused_by_set_and_problem(value):
    problem = rollout(["4", "5"], ["", ""], [[0], [1]])
    with pytest.raises(ConfigError, match=r"^credit.diversity: .* for set 1 of problem 'p': a finite number is needed"):
        set_diversities(problem, lambda answers, texts: value if answers == ["5"] else 0.5)


def test_numpy_numbers_are_numbers():
    problem = rollout(["4", "5"], ["", ""], [[0], [1]])
    assert set_diversities(problem, lambda answers, texts: np.float32(0.5)) == [0.5, 0.5]
    assert set_diversities(problem, lambda answers, texts: np.int64(2)) == [2, 2]


@pytest.mark.parametrize("error", [RuntimeError("no model\nand more"), SystemExit(0), KeyError("4")])
def test_a_function_that_fails_is_one_line_by_set_and_problem(error):
    """SystemExit too: it would end the training as if it were done."""

    def fails(answers, texts):
        if answers == ["5"]:
            raise error
        return 1

    with pytest.raises(ConfigError, match=r"^credit.diversity: fails on set 1 of problem 'p': ") as refused:
        set_diversities(rollout(["4", "5"], ["", ""], [[0], [1]]), fails)
    assert type(error).__name__ in str(refused.value) and "\n" not in str(refused.value)


def test_an_integer_that_no_float_holds_is_refused():
    with pytest.raises(ConfigError, match=r"^credit.diversity: 10+\.\.\. for set 0 of problem 'p': a finite number"):
        set_diversities(rollout(["4"], [""], [[0]]), lambda answers, texts: 10**400)
