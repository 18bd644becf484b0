"""Credits of many levels against fractions; how many traces descend from one, and M, against enumeration."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations, product

import numpy as np
import pytest

from spiral_fast.credit.levels import level_credits
from spiral_fast.credit.sets import multiplicity, sample_sets
from spiral_fast.credit.spiral import spiral_credits
from spiral_fast.levels import Level, descendants_share, level_name, most_descendants, multipliers, populations

THREE = (8, [Level(4, (4,), 2, 8, None, "balanced"), Level(4, (2,), 2, 8, None, "uniform")])
FOUR = (
    6,
    [
        Level(6, (1, 2), 2, 8, None, "balanced"),
        Level(12, (2,), 1, 8, None, "balanced"),
        Level(5, (1, 2, 3), 3, 8, None, "ordered"),
    ],
)
TWO_SIZES = (8, [Level(4, (2, 4), 4, 8, None, "uniform")])


def draw(n_search, levels, rng):
    """Sets of all levels."""
    sets = []
    for population, level in zip(populations(n_search, levels), levels, strict=False):
        drawn = [sample_sets(level.sampler, population, size, level.n_sets, rng) for size in level.set_sizes]
        sets.append([members for of_size in drawn for members in of_size.tolist()])
    return sets


def brute_force(rewards, sets, n_search, levels):
    """By the definition, in fractions, from the ancestors of each top set."""
    top, sizes = levels[-1], populations(n_search, levels)
    f = [sum(map(Fraction, row)) / len(row) for row in rewards.tolist()]
    expected = [[Fraction(r) - score for row, score in zip(rewards.tolist(), f, strict=True) for r in row]]
    ancestors = [set(members) for members in sets[-1]]
    descendants = [{t} for t in range(sizes[-2])]  # of each trace, at the level just below the top
    for level in range(len(levels) - 1, -1, -1):
        m, credits = multipliers(n_search, levels)[level], []
        for i in range(sizes[level]):
            credit = Fraction(0)
            for s, size in enumerate(top.set_sizes):
                of_size = range(s * top.n_sets, (s + 1) * top.n_sets)
                ours = [f[k] for k in of_size if i in ancestors[k]]
                if ours:
                    share = descendants_share(top.sampler, sizes[-2], size, top.n_sets, len(descendants[i]))
                    marginal = sum(ours) / len(ours) - sum(f[k] for k in of_size) / top.n_sets
                    credit += m / share * marginal / len(top.set_sizes)
            credits.append(credit)
        expected.append(credits)
        if level:
            each, below = levels[level - 1].n_aggregations, sets[level - 1]
            ancestors = [{i for t in those for i in below[t // each]} for those in ancestors]
            descendants = [
                {d for t in range(sizes[level]) if i in below[t // each] for d in descendants[t]}
                for i in range(sizes[level - 1])
            ]
    return expected[::-1]


@pytest.mark.parametrize("shape", [THREE, FOUR, TWO_SIZES])
@pytest.mark.parametrize("most", [1, 3])
def test_integer_rewards_give_exact_credits(shape, most):
    n_search, levels = shape
    rng, zeros = np.random.default_rng(0), 0
    for _ in range(20):
        sets = draw(n_search, levels, rng)
        rewards = rng.integers(0, most + 1, (levels[-1].all_sets, levels[-1].n_aggregations)).astype(float)
        found = level_credits(rewards, sets, n_search, levels)
        expected = brute_force(rewards, sets, n_search, levels)
        assert [len(one) for one in found] == populations(n_search, levels)
        for f, e in zip(found, expected, strict=True):
            assert f.tolist() == [float(value) for value in e]  # the nearest float64, 0.0 where it is zero
        zeros += sum(value == 0 for one in expected[:-1] for value in one)
    assert zeros > 0


@pytest.mark.parametrize("shape", [THREE, FOUR, TWO_SIZES])
def test_equal_rewards_give_no_credit_at_all(shape):
    n_search, levels = shape
    sets = draw(n_search, levels, np.random.default_rng(0))
    for value in (0.0, 1.0, 0.1, 1 / 3):
        rewards = np.full((levels[-1].all_sets, levels[-1].n_aggregations), value)
        assert not any(credits.any() for credits in level_credits(rewards, sets, n_search, levels))


def test_rewards_that_are_no_integers():
    n_search, levels = THREE
    rng = np.random.default_rng(1)
    sets = draw(n_search, levels, rng)
    whole = rng.integers(0, 2, (4, 2)).astype(float)
    exact, real = level_credits(whole, sets, n_search, levels), level_credits(whole * 0.1, sets, n_search, levels)
    for e, r in zip(exact, real, strict=True):
        np.testing.assert_allclose(r, 0.1 * e, rtol=0, atol=1e-15)
        assert ((e == 0) == (r == 0)).all()


@pytest.mark.parametrize("sets", [[(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (0, 2)], [(0, 1, 2), (1, 2, 3)]])
def test_one_level_of_one_size_is_spiral(sets):
    levels = [Level(len(sets), (len(sets[0]),), 2, 8, None, "uniform")]
    for rewards in product([0.0, 1.0], repeat=2 * len(sets)):
        table = np.array(rewards).reshape(-1, 2)
        search, aggregation = spiral_credits(table, np.array(sets), 4)
        found = level_credits(table, [sets], 4, levels)
        for f, e in zip(found, (search, aggregation.ravel()), strict=True):
            np.testing.assert_allclose(f, e, rtol=0, atol=1e-16)
            assert ((f == 0) == (e == 0)).all()


def test_a_worked_example():
    """Four search traces in two pairs, two traces below each; the top quotes 0, 1 and 0, 2 and 2, 3: scores 1, 1, 0."""
    levels = [Level(2, (2,), 2, 8, None, "balanced"), Level(3, (2,), 1, 8, None, "uniform")]
    sets = [[[0, 1], [2, 3]], [[0, 1], [0, 2], [2, 3]]]
    search, middle, top = level_credits(np.array([[1.0], [1.0], [0.0]]), sets, 4, levels)
    assert search.tolist() == [1 / 3, 1 / 3, -1 / 6, -1 / 6]  # mean of (1, 1) - 2/3; mean of (1, 0) - 2/3
    assert middle.tolist() == [1 / 3, 1 / 3, -1 / 6, -2 / 3]
    assert not top.any()  # one aggregation below each set: nothing to compare with


@pytest.mark.parametrize(
    ("population", "size", "n_sets", "descendants"),
    [(4, 2, 2, 1), (4, 2, 3, 2), (5, 2, 3, 2), (5, 3, 2, 2), (4, 1, 2, 3), (5, 2, 2, 3), (4, 3, 2, 2)],
)
@pytest.mark.parametrize("sampler", ["uniform", "ordered"])
def test_m_against_all_choices_of_sets(sampler, population, size, n_sets, descendants):
    """M(A) = E of sum over descending sets of 1/d - 1/K, over the chance that one given set descends."""
    pool = list((permutations if sampler == "ordered" else combinations)(range(population), size))
    total, given = Fraction(0), Fraction(0)
    for sets in combinations(pool, n_sets):
        d = sum(bool(set(range(descendants)) & set(members)) for members in sets)
        total += (1 - Fraction(d, n_sets)) if d else 0
        given += Fraction(d, n_sets)
    assert descendants_share(sampler, population, size, n_sets, descendants) == total / given


def test_m_of_two_levels_is_that_of_the_paper():
    for sampler in ("uniform", "ordered", "balanced"):
        levels = [Level(4, (4,), 4, 8, None, sampler)]
        search, top = multipliers(8, levels)
        assert float(search) == multiplicity(sampler, 8, 4, 4) and top == 12


@pytest.mark.parametrize("shape", [THREE, FOUR, TWO_SIZES])
def test_no_trace_has_more_descendants_than_counted(shape):
    n_search, levels = shape
    rng, most = np.random.default_rng(0), most_descendants(n_search, levels)
    seen = [0] * len(levels)
    for _ in range(50):
        descendants = [{t} for t in range(populations(n_search, levels)[-2])]
        sets = draw(n_search, levels, rng)
        for level in range(len(levels) - 1, -1, -1):
            seen[level] = max(seen[level], *map(len, descendants))
            if level:
                each, below = levels[level - 1].n_aggregations, sets[level - 1]
                descendants = [
                    {d for t, ours in enumerate(descendants) if i in below[t // each] for d in ours}
                    for i in range(populations(n_search, levels)[level - 1])
                ]
    assert seen == most


def test_balanced_top_has_no_exact_credit_further_below():
    with pytest.raises(ValueError, match="balanced"):
        descendants_share("balanced", 8, 2, 4, 2)


def test_names():
    assert [level_name(level) for level in range(4)] == ["search", "aggregation", "aggregation_2", "aggregation_3"]
