"""More than two levels and several set sizes: E[update of a level] = M grad J of it, by exact enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.credit.levels import level_credits
from spiral_fast.levels import Level, multipliers, populations
from tests.credit.tower import expected_update, flat, make_policy, structures


def level(n_sets, sizes, n_aggregations, sampler="balanced"):
    return Level(n_sets, sizes if isinstance(sizes, tuple) else (sizes,), n_aggregations, 8, None, sampler)


SHAPES = {  # search traces, levels above
    "two levels": (3, [level(2, 2, 2, "uniform")]),
    "two levels, two sizes": (3, [level(2, (1, 2), 2, "uniform")]),
    "two levels, two sizes, ordered": (3, [level(2, (1, 2), 1, "ordered")]),
    "two levels, two sizes, balanced": (4, [level(4, (1, 2), 1)]),
    "three levels": (4, [level(2, 2, 2), level(3, 2, 1, "uniform")]),
    "three levels, ordered top": (4, [level(2, 2, 2), level(2, 2, 1, "ordered")]),
    "three levels, each trace in two sets": (3, [level(3, 2, 1), level(2, 1, 2, "uniform")]),
    "three levels, two sizes above": (4, [level(2, 2, 2), level(2, (1, 2), 1, "uniform")]),
    "three levels, two sizes below": (3, [level(3, (1, 2), 1), level(2, 2, 1, "uniform")]),
    "four levels": (3, [level(3, 1, 2), level(3, 2, 1), level(2, 1, 1, "uniform")]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_update_is_m_times_the_gradient(name):
    n_search, levels = SHAPES[name]
    found, true, _ = expected_update(n_search, levels, make_policy(levels))
    for m, f, t in zip(multipliers(n_search, levels), flat(found), flat(true), strict=True):
        assert np.abs(t).max() > 1e-4
        np.testing.assert_allclose(f, float(m) * t, rtol=0, atol=1e-13)


def test_the_gradient_is_that_of_j():
    """What the update is compared with, against differences of J itself."""
    n_search, levels = SHAPES["three levels, each trace in two sets"]
    policy = make_policy(levels)
    _, true, _ = expected_update(n_search, levels, policy)
    for of_level, gradient in zip(policy, true, strict=True):
        for size, logits in of_level.items():
            for place in np.ndindex(logits.shape):
                values = []
                for step in (1e-5, -1e-5):
                    logits[place] += step
                    values.append(expected_update(n_search, levels, policy, no_credits)[2])
                    logits[place] -= step
                slope = (values[0] - values[1]) / 2e-5
                assert slope == pytest.approx(gradient[size][place], abs=1e-9)


def no_credits(rewards, sets, n_search, levels):
    return [np.zeros(size) for size in populations(n_search, levels)]


def mean_of_descending(rewards, sets, n_search, levels):
    """Mean over the top sets that descend from a trace minus mean over all, whatever its number of descendants."""
    f = rewards.mean(axis=1)
    quoting = [set(members) for members in sets[-1]]  # of each top set: the traces of a level it descends from
    found = [(rewards - f[:, None]).ravel()]
    for level in range(len(levels) - 1, -1, -1):
        descending = [
            [k for k, traces in enumerate(quoting) if i in traces] for i in range(populations(n_search, levels)[level])
        ]
        found.append(np.array([f[those].mean() - f.mean() if those else 0.0 for those in descending]))
        if level:
            each = levels[level - 1].n_aggregations
            quoting = [{i for t in traces for i in sets[level - 1][t // each]} for traces in quoting]
    return found[::-1]


def handed_down(rewards, sets, n_search, levels):
    """Level by level: a set is worth the mean of the traces below it, a trace the mean over the sets that quote it."""
    f = rewards.mean(axis=1)
    found = [(rewards - f[:, None]).ravel()]
    for level in range(len(levels) - 1, -1, -1):
        quoting = [
            [k for k, those in enumerate(sets[level]) if i in those]
            for i in range(populations(n_search, levels)[level])
        ]
        worth = np.array([f[those].mean() if those else f.mean() for those in quoting])
        found.append(worth - f.mean())
        f = worth.reshape(-1, levels[level - 1].n_aggregations).mean(axis=1) if level else f
    return found[::-1]


BELOW_UNIFORM = (4, [level(2, 2, 2, "uniform"), level(3, 2, 1, "uniform")])
BALANCED_TOP = (4, [level(2, 2, 2), level(4, 2, 1)])


@pytest.mark.parametrize(
    ("shape", "credits", "expected"),
    [
        (SHAPES["three levels"], handed_down, (0.072, 0.297)),
        (SHAPES["four levels"], mean_of_descending, (0.605, 0.595)),
        (BELOW_UNIFORM, mean_of_descending, (0.080, 0.137)),
        (BALANCED_TOP, mean_of_descending, (0.180, 0.222)),
    ],
)
def test_simpler_credits_give_no_multiple_of_the_gradient(shape, credits, expected):
    """Why the credits divide by M(A), and why sets are balanced below the top and not balanced at the top: what
    multiple of the search gradient the update is depends on the policy. docs/levels.md shows the figures."""
    n_search, levels = shape
    factors = []
    for seed in (1, 2):
        found, true, _ = expected_update(n_search, levels, make_policy(levels, seed), credits)
        (f, *_), (t, *_) = flat(found), flat(true)
        factors.append(f @ t / (t @ t))
    assert factors == pytest.approx(expected, abs=6e-4)


def test_equal_numbers_of_descendants_need_no_division():
    n_search, levels = SHAPES["three levels"]
    rng = np.random.default_rng(0)
    for sets, _ in structures(n_search, levels):
        rewards = rng.integers(0, 2, (3, 1)).astype(float)
        pairs = zip(
            level_credits(rewards, sets, n_search, levels),
            mean_of_descending(rewards, sets, n_search, levels),
            strict=True,
        )
        for found, plain in pairs:
            np.testing.assert_allclose(found, plain, rtol=0, atol=1e-15)
