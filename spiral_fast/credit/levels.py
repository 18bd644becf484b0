"""Credits of any number of levels and set sizes: SPIRAL's, carried down from the top. Proofs: docs/levels.md.

J = E of the reward of a top trace, over the sizes of the top's sets in equal parts. Only top traces are credited by
their own reward. f(H) is the mean reward below the top set H.

top          A(y_j^H) = r_j - f(H)
level l < L  A(y) = mean over set sizes s of (M_l / M_s(A_y)) * (mean f of the size's sets that descend from y - mean f
             of all of the size's sets), a size of which no set descends counting 0

A set descends from the traces it quotes, and from what those descend from; A_y traces of level L - 1 descend from y
(itself, when it is one of them). M_s(A) is `levels.descendants_share`, M_l its least value, `levels.multipliers`.
E[sum over y of A(y) grad log pi(y)] = M_l grad_l J for each level l, exactly. One level above search and one size are
SPIRAL's equations 8 and 9 (arXiv 2606.23595).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np

from spiral_fast.levels import Level, descendants_share, multipliers, populations

TOLERANCE = 1e-9  # of max|r|: below it a credit of rewards that are not integers is zero


def level_credits(
    rewards: np.ndarray, sets: Sequence[Sequence[Sequence[int]]], n_search: int, levels: Sequence[Level]
) -> list[np.ndarray]:
    """rewards (K, n_aggregations) float64 of the top's traces; sets[l - 1][k] the members of set k of level l, flat
    indices of traces of level l - 1.

    Credits before the gate, one flat float64 array per level, search first. Integer rewards are computed with as
    fractions: a credit that is zero in exact arithmetic is 0.0. Other rewards: zero within 1e-9 max|r|.
    """
    levels = tuple(levels)
    top = levels[-1]
    if np.all(rewards == np.round(rewards)):
        table = [[Fraction(int(r)) for r in row] for row in rewards.tolist()]
        tolerance = 0.0
    else:
        table = rewards.tolist()
        tolerance = TOLERANCE * float(np.abs(rewards).max())
    scores = [sum(row) / len(row) for row in table]  # f(H)
    means = [  # of each size
        sum(scores[first : first + top.n_sets]) / top.n_sets for first in range(0, top.all_sets, top.n_sets)
    ]

    ours = [{t} for t in range(populations(n_search, levels)[-2])]  # of each trace of a level: descendants, level L - 1
    found = [_decided([r - f for row, f in zip(table, scores, strict=True) for r in row], tolerance)]
    for level in range(len(levels) - 1, -1, -1):
        if level < len(levels) - 1:
            ours = _below(ours, sets[level], levels[level].n_aggregations, populations(n_search, levels)[level])
        credits = []
        for descendants in ours:
            descending = [k for k, members in enumerate(sets[-1]) if not descendants.isdisjoint(members)]
            factors = _factors(n_search, levels, level, len(descendants))
            credit = Fraction(0)
            for size, (factor, mean) in enumerate(zip(factors, means, strict=True)):
                own = [scores[k] for k in descending if k // top.n_sets == size]
                if own:
                    credit += (sum(own) / len(own) - mean) * factor
            credits.append(credit)
        found.append(_decided(credits, tolerance))
    return found[::-1]


def _below(
    above: list[set[int]], sets: Sequence[Sequence[int]], n_aggregations: int, population: int
) -> list[set[int]]:
    """The same for the level below: a trace has the descendants of all traces whose prompt quotes it."""
    found: list[set[int]] = [set() for _ in range(population)]
    for k, members in enumerate(sets):
        group = set().union(*above[k * n_aggregations : (k + 1) * n_aggregations])
        for member in members:
            found[member] |= group
    return found


@cache
def _factors(n_search: int, levels: tuple[Level, ...], level: int, descendants: int) -> list[Fraction]:
    """M_l / M_s(A) / number of sizes, for each size s."""
    top, population = levels[-1], populations(n_search, levels)[-2]
    if not descendants:
        return [Fraction(0)] * len(top.set_sizes)
    m = multipliers(n_search, levels)[level]
    shares = [descendants_share(top.sampler, population, size, top.n_sets, descendants) for size in top.set_sizes]
    return [m / (share * len(shares)) for share in shares]


def _decided(credits: list[Fraction | float], tolerance: float) -> np.ndarray:
    values = np.array([float(credit) for credit in credits])
    return np.where(np.abs(values) <= tolerance, 0.0, values)
