"""A toy policy of any number of levels, and the expectation of its update by exact enumeration over all outcomes.

A search trace is one of two actions, softmax of 2 parameters. A trace of a level above is one of two actions, softmax
of 2 parameters of its own for each ordered tuple of actions that it quotes; at the top action 1 has reward 1, action 0
none.
Enumerated: every structure of sets, every table of actions. No sampling anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np

from spiral_fast.credit.levels import level_credits
from spiral_fast.credit.sets import sample_sets
from spiral_fast.levels import Level, populations
from tests.credit.choices import distribution

Sets = tuple[tuple[tuple[int, ...], ...], ...]  # by level, by set: the members
Parameters = list[dict[int, np.ndarray]]  # of each level, by number of quoted traces n: (2, ..., 2, 2), n + 1 axes


def make_policy(levels: list[Level], seed: int = 0) -> Parameters:
    rng = np.random.default_rng(seed)
    return [{size: rng.normal(size=(2,) * (size + 1)) for size in sizes} for sizes in _sizes(levels)]


def structures(n_search: int, levels: list[Level]) -> Iterator[tuple[Sets, Fraction]]:
    """Every outcome of drawing the sets of all levels, with its probability."""
    parts, level_of = [], []
    for number, (population, level) in enumerate(zip(populations(n_search, levels), levels, strict=False)):
        for size in level.set_sizes:

            def sample(rng, level=level, population=population, size=size):
                found = sample_sets(level.sampler, population, size, level.n_sets, rng)
                return tuple(sorted(map(tuple, found.tolist())))

            parts.append(list(distribution(sample).items()))
            level_of.append(number)
    for drawn in product(*parts):
        sets: list[tuple[tuple[int, ...], ...]] = [()] * len(levels)
        for number, (of_size, _) in zip(level_of, drawn, strict=True):
            sets[number] += of_size
        yield tuple(sets), prod(p for _, p in drawn)


def expected_update(
    n_search: int, levels: list[Level], policy: Parameters, credits: Callable = level_credits
) -> tuple[Parameters, Parameters, float]:
    """E of the update, grad J and J; `credits` as `level_credits`."""
    chances = [{size: _softmax(logits) for size, logits in of_level.items()} for of_level in policy]
    found, true = ([{n: np.zeros_like(x) for n, x in one.items()} for one in policy] for _ in range(2))
    sizes, top, j = populations(n_search, levels), levels[-1], 0.0
    tables = np.array(list(product((0, 1), repeat=sizes[-1])))  # (T, top traces) actions, which are the rewards
    rewards = tables.reshape(-1, top.all_sets, top.n_aggregations).astype(float)
    below = np.array(list(product((0, 1), repeat=sum(sizes[:-1]))))  # (B, traces below the top) actions
    actions = np.split(below, np.cumsum(sizes[:-1])[:-1], axis=1)
    for sets, p_sets in structures(n_search, levels):
        given = [credits(table, sets, n_search, levels) for table in rewards]
        quotes = [[()] * n_search]  # of each trace of each level
        for of_level, level in zip(sets, levels, strict=True):
            quotes.append([members for members in of_level for _ in range(level.n_aggregations)])

        def quoted(level, i, quotes=quotes):  # where the parameters of the trace lie, (B,) index arrays
            return tuple(actions[level - 1][:, m] for m in quotes[level][i])

        p = np.full(len(below), float(p_sets))
        for level, chosen in enumerate(actions):
            for i in range(sizes[level]):
                p *= chances[level][len(quotes[level][i])][(*quoted(level, i), chosen[:, i])]
        joint = p[:, None].repeat(len(tables), 1)  # (B, T)
        for i in range(sizes[-1]):
            chance = np.broadcast_to(chances[-1][len(quotes[-1][i])][quoted(len(levels), i)], (len(below), 2))
            joint *= chance[:, tables[:, i]]
        means = rewards.mean(axis=(1, 2))
        j += (joint @ means).sum()
        for level in range(len(sizes)):
            by_table = np.array([one[level] for one in given])  # (T, traces)
            for i in range(sizes[level]):
                n = len(quotes[level][i])
                chance = np.broadcast_to(chances[level][n][quoted(level, i)], (len(below), 2))
                for value in (0, 1):
                    if level < len(levels):
                        weight = joint * (actions[level][:, i] == value)[:, None]
                    else:
                        weight = joint * (tables[:, i] == value)
                    score = np.eye(2)[value] - chance  # (B, 2)
                    for into, what in ((found, by_table[:, i]), (true, means)):
                        np.add.at(into[level][n], quoted(level, i) or ..., _total(weight @ what, score, n))
    return found, true, j


def _total(weight: np.ndarray, score: np.ndarray, n: int) -> np.ndarray:
    """(B, 2); summed to (2,) where the trace quotes nothing."""
    weighted = weight[:, None] * score
    return weighted if n else weighted.sum(axis=0)


def flat(parameters: Parameters) -> list[np.ndarray]:
    """One vector per level."""
    return [np.concatenate([x.ravel() for x in of_level.values()]) for of_level in parameters]


def _sizes(levels: list[Level]) -> list[tuple[int, ...]]:
    return [(0,), *(level.set_sizes for level in levels)]


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
