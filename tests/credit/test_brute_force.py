"""The credits beside SPIRAL's and GRPO's, against tables in fractions: every reward vector of small shapes."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest

from spiral_fast.credit.aggregator_only import aggregator_only_credits
from spiral_fast.credit.diversity import distinct_answers
from spiral_fast.credit.grpo import grpo_credits
from spiral_fast.credit.independent import independent_credits
from spiral_fast.credit.poly_epo import poly_epo_credits
from spiral_fast.credit.search_only import search_only_credits

ALL_PAIRS = list(combinations(range(4), 2))
SETS = [  # (N1, sets, N2); in the second, trace 3 is in no set
    (4, [(0, 1), (1, 2), (2, 3)], 2),
    (4, [(0, 1), (1, 2), (0, 2)], 3),
    (3, [(0, 1), (1, 2)], 4),
    (3, [(0, 1, 2)], 3),
]


def mean(values) -> Fraction:
    values = [Fraction(value) for value in values]
    return sum(values, Fraction(0)) / len(values)


def of_sets(scores, sets, n_search) -> list[Fraction]:
    """Each trace's mean over its sets of score - mean score."""
    return [
        mean([scores[k] - mean(scores) for k, members in enumerate(sets) if i in members] or [0])
        for i in range(n_search)
    ]


def assert_exact(found: np.ndarray, expected) -> None:
    """Equal, and 0.0 exactly where the fraction is 0."""
    found, expected = (
        np.ravel(found).tolist(),
        [e for row in expected for e in (row if isinstance(row, list) else [row])],
    )
    np.testing.assert_allclose(found, [float(e) for e in expected], rtol=0, atol=1e-14)
    assert [f == 0 for f in found] == [e == 0 for e in expected]


@pytest.mark.parametrize("n_search, sets, n_aggregations", SETS)
def test_aggregations_against_their_set_and_search_by_its_sets(n_search, sets, n_aggregations):
    for rewards in product([0, 1], repeat=len(sets) * n_aggregations):
        table = np.array(rewards, float).reshape(len(sets), n_aggregations)
        scores = [mean(row) for row in table.astype(int).tolist()]
        centred = [
            [Fraction(r) - score for r in row] for row, score in zip(table.astype(int).tolist(), scores, strict=True)
        ]

        search, aggregation = aggregator_only_credits(table, np.array(sets), n_search)
        assert_exact(search, [Fraction(0)] * n_search)
        assert_exact(aggregation, centred)

        search, aggregation = search_only_credits(table, np.array(sets), n_search)
        assert_exact(search, of_sets(scores, sets, n_search))
        assert aggregation.shape == table.shape and not aggregation.any()


@pytest.mark.parametrize("n_search, sets, n_aggregations", [SETS[0], SETS[3], (3, [(0, 1), (1, 2)], 2)])
def test_independent(n_search, sets, n_aggregations):
    for own in product([0, 1], repeat=n_search):
        for rewards in product([0, 1], repeat=len(sets) * n_aggregations):
            table = np.array(rewards, float).reshape(len(sets), n_aggregations)
            search, aggregation = independent_credits(np.array(own, float), table, np.array(sets))
            assert_exact(search, [Fraction(r) - mean(own) for r in own])
            assert_exact(aggregation, [[Fraction(int(r)) - mean(map(int, row)) for r in row] for row in table])


@pytest.mark.parametrize(
    "n_search, sets",
    [
        (4, ALL_PAIRS),
        (4, [(0, 1), (1, 2), (0, 2)]),  # trace 3 in no set
        (4, list(combinations(range(4), 3))),
        (4, [(0, 1, 2), (1, 2, 3), (0, 1, 3)]),
    ],
)
def test_poly_epo_on_all_rewards_and_answers(n_search, sets):
    for answers in product(["4", "5", None], repeat=n_search):
        d = [distinct_answers([answers[i] for i in members], [""] * len(members)) for members in sets]
        for rewards in product([0, 1], repeat=n_search):
            scores = [mean(rewards[i] for i in members) * d[k] for k, members in enumerate(sets)]
            found = poly_epo_credits(np.array(rewards, float), np.array(sets), d)
            assert_exact(found, of_sets(scores, sets, n_search))


def test_poly_epo_with_real_rewards_or_diversity_uses_the_tolerance():
    sets = np.array(ALL_PAIRS)
    third = np.array([0.1, 0.1, 0.1, 0.1])
    assert not poly_epo_credits(third, sets, [Fraction(1, 3)] * 6).any()
    assert not poly_epo_credits(np.ones(4), sets, [0.1 + 0.2, 0.3, 0.3, 0.3, 0.3, 0.3]).any()
    assert poly_epo_credits(np.ones(4), sets, [0.3 + 1e-7, 0.3, 0.3, 0.3, 0.3, 0.3]).all()
    # The same credits whether d is written as a fraction or as a float.
    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards, d = rng.integers(0, 2, 4).astype(float), [Fraction(int(a), 7) for a in rng.integers(0, 8, 6)]
        exact, real = poly_epo_credits(rewards, sets, d), poly_epo_credits(rewards, sets, [float(x) for x in d])
        np.testing.assert_allclose(exact, real, rtol=0, atol=1e-12)


def test_poly_epo_with_denominators_that_no_float_holds():
    sets = np.array([(0, 1), (1, 2), (2, 3)])
    d = [Fraction(1, 2**61 - 1), Fraction(1, 2**31 - 1), Fraction(1, 3)]
    scores = [d[0] / 2, d[1] / 2, d[2] / 2]
    found = poly_epo_credits(np.array([1.0, 0.0, 1.0, 0.0]), sets, d)
    np.testing.assert_allclose(found, [float(x) for x in of_sets(scores, sets.tolist(), 4)], rtol=1e-9)


def test_poly_epo_raises_a_wrong_trace_that_makes_its_sets_diverse():
    """Traces 0 to 2 are right and say the same; trace 3 is wrong and says something else."""
    answers = ["4", "4", "4", "5"]
    d = [distinct_answers([answers[i] for i in members], ["", ""]) for members in ALL_PAIRS]
    credits = poly_epo_credits(np.array([1.0, 1.0, 1.0, 0.0]), np.array(ALL_PAIRS), d)
    assert not credits.any()  # 1 * 1/2 = 1/2 * 2/2: what it lacks in reward it gives in diversity
    d = [Fraction(len({answers[i] for i in members})) ** 2 for members in ALL_PAIRS]
    assert poly_epo_credits(np.array([1.0, 1.0, 1.0, 0.0]), np.array(ALL_PAIRS), d)[3] > 0


def test_independent_is_grpo_above_and_spiral_below():
    rng = np.random.default_rng(0)
    own, table, sets = rng.normal(size=5), rng.normal(size=(3, 4)), np.array([(0, 1), (2, 3), (1, 4)])
    search, aggregation = independent_credits(own, table, sets)
    assert search.tolist() == grpo_credits(own).tolist()
    assert aggregation.tolist() == aggregator_only_credits(table, sets, 5)[1].tolist()
