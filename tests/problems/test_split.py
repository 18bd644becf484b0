from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_fast.config import ConfigError
from spiral_fast.problems.split import hold_out
from spiral_fast.trace import Problem


def problems(numbers):
    return [Problem(f"row {place}", f"What is {n} + {n}?", str(2 * n)) for place, n in enumerate(numbers)]


def questions(some):
    return {problem.question for problem in some}


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 50), st.floats(0.1, 0.6))
def test_a_fraction_is_a_property_of_the_question_alone(rng, seed, fraction):
    """Rows added, taken out or moved leave every other row on its side."""
    numbers = list(range(200))
    train, evaluation = hold_out(problems(numbers), seed, fraction=fraction)
    rng.shuffle(numbers)
    more = numbers[:150] + list(range(1000, 1100))
    train_again, evaluation_again = hold_out(problems(more), seed, fraction=fraction)
    assert not questions(train_again) & questions(evaluation) and not questions(evaluation_again) & questions(train)


def test_the_share_is_what_was_asked_for():
    train, evaluation = hold_out(problems(range(5000)), 0, fraction=0.1)
    assert len(train) + len(evaluation) == 5000 and abs(len(evaluation) - 500) < 5 * (5000 * 0.1 * 0.9) ** 0.5


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(1, 60), st.integers(0, 30))
def test_a_size_is_kept_and_added_rows_move_at_most_as_many(seed, size, added):
    train, evaluation = hold_out(problems(range(100)), seed, size=size)
    assert len(evaluation) == size and len(train) == 100 - size
    _, again = hold_out(problems([*range(500, 500 + added), *range(100)]), seed, size=size)
    assert len(again) == size and len(questions(evaluation) - questions(again)) <= added


def test_both_sides_keep_the_order_and_the_seed_counts():
    train, evaluation = hold_out(problems(range(100)), 3, size=20)
    places = [int(problem.id.split()[1]) for problem in [*train, *evaluation]]
    assert (
        places[:80] == sorted(places[:80]) and places[80:] == sorted(places[80:]) and sorted(places) == list(range(100))
    )
    assert questions(hold_out(problems(range(100)), 4, size=20)[1]) != questions(evaluation)


@pytest.mark.parametrize("how", [{"size": 15}, {"fraction": 0.3}])
def test_rows_with_the_same_question_stay_together(how):
    rows = problems([n // 2 for n in range(100)])
    train, evaluation = hold_out(rows, 1, **how)
    assert not questions(train) & questions(evaluation) and len(train) + len(evaluation) == 100
    if "size" in how:
        assert len(evaluation) == 16


def test_the_split_is_pinned():
    """A resumed or repeated run must hold out the same problems, also after an upgrade."""
    assert [p.id for p in hold_out(problems(range(20)), 0, size=4)[1]] == PINNED


PINNED = ["row 1", "row 5", "row 9", "row 13"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"size": 10}, "problems.eval_size: 10 of 10 problems leaves no training problem"),
        ({"size": 64}, "problems.eval_size: 64 of 10 problems leaves no training problem"),
        ({"fraction": 1e-9}, "problems.eval_fraction: 1e-09 of 10 problems leaves no evaluation problem"),
    ],
)
def test_an_empty_side_is_refused(how, says):
    with pytest.raises(ConfigError, match=says):
        hold_out(problems(range(10)), 0, **how)
