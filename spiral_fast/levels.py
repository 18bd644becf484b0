"""The levels above search, and how much of the gradient each level's credits hold. Imports no torch; docs/levels.md.

Level l draws sets from its population, the traces of level l - 1 (flat index: set * n_aggregations + index), and
samples n_aggregations traces below each set. The paper has one such level; here there are L, the last is the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb, perm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spiral_fast.config import Config


@dataclass(frozen=True)
class Level:
    """One level above search."""

    n_sets: int  # K: sets of each size
    set_sizes: tuple[int, ...]  # n of each size
    n_aggregations: int  # traces below each set
    max_new_tokens: int
    target_length: int | None
    sampler: str  # uniform | ordered | balanced

    @property
    def all_sets(self) -> int:
        """Sets of all sizes; those of the first size come first."""
        return self.n_sets * len(self.set_sizes)

    @property
    def n_traces(self) -> int:
        return self.all_sets * self.n_aggregations


def levels_of(config: Config) -> list[Level]:
    """Levels 1, 2, ... of `rollout.levels`, else the one of the paper's keys; none where no sets are drawn.

    Sets of the top level are drawn by `rollout.set_sampler`, those below it are balanced (docs/levels.md says why).
    """
    rollout = config.rollout
    if not rollout.levels:
        if not rollout.n_sets:
            return []
        tokens, target = rollout.aggregation_max_new_tokens, config.credit.aggregation_target_length
        sizes = (rollout.set_size,)
        return [Level(rollout.n_sets, sizes, rollout.n_aggregations, tokens, target, rollout.set_sampler)]
    return [
        Level(
            level.n_sets,
            tuple(level.set_size) if isinstance(level.set_size, list) else (level.set_size,),
            level.n_aggregations,
            level.max_new_tokens,
            level.target_length,
            rollout.set_sampler if number == len(rollout.levels) else "balanced",
        )
        for number, level in enumerate(rollout.levels, start=1)
    ]


def level_name(level: int) -> str:
    """As metrics and messages call it: search, aggregation, aggregation_2, aggregation_3, ..."""
    return ("search", "aggregation")[level] if level < 2 else f"aggregation_{level}"


def max_new_tokens(config: Config, level: int) -> int:
    """L_max of a trace of that level; above the top, in an evaluation that aggregates more often, the top's."""
    if level == 0:
        return config.rollout.search_max_new_tokens
    levels = levels_of(config)
    return levels[min(level, len(levels)) - 1].max_new_tokens if levels else config.rollout.aggregation_max_new_tokens


def largest_set(config: Config) -> int:
    """Most traces that a rollout's prompt quotes; 0 where nothing is aggregated."""
    return max((max(level.set_sizes) for level in levels_of(config) if level.n_aggregations), default=0)


def populations(n_search: int, levels: list[Level]) -> list[int]:
    """Number of traces of level 0, 1, ..., L: what the sets of the next level are drawn from."""
    return [n_search, *(level.n_traces for level in levels)]


def descendants_share(sampler: str, population: int, set_size: int, n_sets: int, descendants: int) -> Fraction:
    """M(A): what the mean over descending sets minus the mean over all sets holds of a trace's part of grad J.

    Of K = `n_sets` distinct sets of n = `set_size` traces out of P = `population`, a set descends from a trace when it
    contains at least one of the A = `descendants` traces that descend from it (A = 1: the trace itself).
    M(A) = q / p - 1 with p = P(a given set descends), q = P(at least one of the K does):
    p = 1 - C(P - A, n) / C(P, n), q = 1 - C(C(P - A, n), K) / C(C(P, n), K); `ordered`: falling factorials; `balanced`
    (A = 1 alone): q = 1. A = 1 is `credit.sets.multiplicity`. 0 where every set descends: no credit can be told.
    """
    if sampler == "balanced":
        if descendants != 1:
            raise ValueError("balanced sets give no exact credit to a level that is not just below them")
        return Fraction(population, set_size) - 1
    count = perm if sampler == "ordered" else comb
    sets, without = count(population, set_size), count(population - descendants, set_size)
    p = 1 - Fraction(without, sets)
    q = 1 - Fraction(comb(without, n_sets), comb(sets, n_sets))
    return q / p - 1


def most_descendants(n_search: int, levels: list[Level]) -> list[int]:
    """For level 0 .. L - 1: how many traces of level L - 1, which the top quotes, can descend from one trace."""
    below_top = levels[:-1]
    sizes = populations(n_search, levels)
    found = []
    for level in range(len(levels)):
        most = 1
        for above in range(level, len(below_top)):
            one = below_top[above]
            each = one.n_sets * sum(one.set_sizes) // sizes[above]  # balanced: the sets that contain one given trace
            most = min(one.all_sets, most * each) * one.n_aggregations
        found.append(most)
    return found


def multipliers(n_search: int, levels: list[Level]) -> list[Fraction]:
    """M of every level: E[update of level l] = M_l grad_l J. Search first, the top last.

    Top: (all its sets) * (n_aggregations - 1). Below: the least M(A) of any trace and set size, so that no credit is
    scaled up.
    """
    top, population = levels[-1], populations(n_search, levels)[-2]
    below = [
        min(descendants_share(top.sampler, population, size, top.n_sets, most) for size in top.set_sizes)
        for most in most_descendants(n_search, levels)
    ]
    return [*below, Fraction(top.all_sets * (top.n_aggregations - 1))]
