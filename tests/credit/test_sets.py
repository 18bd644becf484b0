"""Set samplers: exact distributions, by walking every sequence of choices of the real code."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations
from math import comb, perm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_fast.credit.sets import _balance, multiplicity, sample_sets, shared_first
from tests.credit.choices import distribution


def families(sampler, n_search, set_size, n_sets, **order):
    """Distribution of the family of sets, as a frozenset of member tuples."""
    return distribution(
        lambda rng: frozenset(map(tuple, sample_sets(sampler, n_search, set_size, n_sets, rng, **order).tolist()))
    )


@pytest.mark.parametrize("n_search, set_size, n_sets", [(4, 2, 2), (4, 2, 3), (5, 3, 2), (3, 2, 3), (4, 3, 1)])
def test_uniform_draws_every_family_of_ascending_sets_equally_often(n_search, set_size, n_sets):
    expected = {frozenset(f) for f in combinations(combinations(range(n_search), set_size), n_sets)}
    found = families("uniform", n_search, set_size, n_sets)
    assert set(found) == expected
    assert set(found.values()) == {Fraction(1, len(expected))}


@pytest.mark.parametrize("n_search, set_size, n_sets", [(3, 2, 2), (4, 2, 2), (3, 2, 3), (4, 3, 2)])
def test_ordered_draws_every_family_of_tuples_equally_often(n_search, set_size, n_sets):
    expected = {frozenset(f) for f in combinations(permutations(range(n_search), set_size), n_sets)}
    found = families("ordered", n_search, set_size, n_sets)
    assert set(found) == expected
    assert set(found.values()) == {Fraction(1, len(expected))}


@pytest.mark.parametrize(
    "n_search, set_size, n_sets", [(4, 2, 2), (4, 2, 4), (3, 2, 3), (6, 2, 3), (6, 3, 2), (4, 3, 4)]
)
def test_balanced_is_symmetric_under_relabelling_of_the_traces(n_search, set_size, n_sets):
    found = families("balanced", n_search, set_size, n_sets)
    assert sum(found.values()) == 1
    for family in found:
        counts = np.bincount([trace for members in family for trace in members], minlength=n_search)
        assert len(family) == n_sets and set(counts) == {n_sets * set_size // n_search}
    for relabel in permutations(range(n_search)):
        moved = {frozenset(tuple(sorted(relabel[i] for i in s)) for s in f): p for f, p in found.items()}
        assert moved == found


@pytest.mark.parametrize(
    "start",
    [
        [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2)],
        [(0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 4, 5)],
        [(0, 1), (2, 3), (0, 2), (0, 3), (1, 2), (4, 5)],
    ],
)
def test_balancing_commutes_with_relabelling(start):
    """The distribution of what the exchanges make of a family moves along with the names of its traces."""
    n_search = 1 + max(max(members) for members in start)

    def balanced(family):
        return distribution(lambda rng: frozenset(_balance(list(family), n_search, rng)))

    start = [frozenset(members) for members in start]
    found = balanced(start)
    assert len(found) > 1
    for relabel in list(permutations(range(n_search)))[1::7]:
        moved = {frozenset(frozenset(relabel[i] for i in s) for s in f): p for f, p in found.items()}
        assert balanced([frozenset(relabel[i] for i in members) for members in start]) == moved


shapes = st.integers(2, 9).flatmap(
    lambda n_search: st.tuples(st.just(n_search), st.integers(1, n_search)).flatmap(
        lambda t: st.tuples(st.just(t[0]), st.just(t[1]), st.integers(1, min(comb(*t), 12)))
    )
)


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(0, 2**32 - 1), st.sampled_from(["uniform", "ordered", "balanced"]))
def test_sets_are_distinct_and_members_do_not_repeat(shape, seed, sampler):
    n_search, set_size, n_sets = shape
    if sampler == "balanced" and (n_sets * set_size) % n_search:
        with pytest.raises(ValueError, match="must divide"):
            sample_sets(sampler, *shape, np.random.default_rng(seed))
        return
    sets = sample_sets(sampler, *shape, np.random.default_rng(seed))
    assert sets.shape == (n_sets, set_size) and sets.dtype == np.int64
    assert sets.min() >= 0 and sets.max() < n_search
    assert all(len(set(members)) == set_size for members in sets.tolist())
    assert len(set(map(tuple, sets.tolist()))) == n_sets
    assert np.array_equal(sets, sample_sets(sampler, *shape, np.random.default_rng(seed)))
    if sampler != "ordered":
        assert np.array_equal(sets, np.sort(sets, axis=1))
    if sampler == "balanced":
        assert set(np.bincount(sets.ravel(), minlength=n_search)) == {n_sets * set_size // n_search}


def test_balanced_reaches_every_set_when_all_are_asked_for():
    sets = sample_sets("balanced", 8, 4, 70, np.random.default_rng(0))
    assert set(map(tuple, sets.tolist())) == set(combinations(range(8), 4))


def trie_nodes(sets):
    return len({tuple(members[:depth]) for members in sets.tolist() for depth in range(1, len(members) + 1)})


def test_shared_first_keeps_the_members_and_shares_prefixes():
    sets = np.array([[0, 1, 2, 3], [2, 3, 4, 5], [1, 2, 3, 6], [0, 4, 5, 7]])
    ordered = shared_first(sets)
    assert ordered.tolist() == [[2, 3, 1, 0], [2, 3, 4, 5], [2, 3, 1, 6], [0, 4, 5, 7]]
    assert trie_nodes(ordered) == 11 < trie_nodes(sets) == 15


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_shared_first_reorders_within_sets_only(seed):
    rng = np.random.default_rng(seed)
    sets = sample_sets("balanced", 8, 4, 4, rng)
    ordered = shared_first(sets)
    assert np.array_equal(np.sort(ordered, axis=1), sets)
    assert np.array_equal(shared_first(ordered[:, ::-1]), ordered)  # a function of membership alone


def test_shared_first_needs_fewer_trie_nodes_at_the_papers_shape():
    rng = np.random.default_rng(0)
    draws = [sample_sets("balanced", 8, 4, 4, rng) for _ in range(50)]
    assert all(trie_nodes(shared_first(sets)) <= trie_nodes(sets) for sets in draws)
    assert sum(trie_nodes(shared_first(sets)) for sets in draws) < sum(map(trie_nodes, draws))


@pytest.mark.parametrize("sampler, printed", [("uniform", 0.8858), ("ordered", 0.8754), ("balanced", 1.0)])
def test_multiplicity_at_the_papers_shape(sampler, printed):
    assert round(multiplicity(sampler, 8, 4, 4), 4) == printed


def test_multiplicity_of_uniform_counts_the_families_that_miss_a_trace():
    """(8, 4, 4): all 916,895 families of 4 sets as bit masks of their members."""
    masks = np.array([sum(1 << i for i in members) for members in combinations(range(8), 4)])
    missing = 0
    for first, second in combinations(range(len(masks)), 2):
        later = masks[second + 1 :]
        union = masks[first] | masks[second] | later
        pairs = union[:, None] | later  # later sets in both orders
        above = np.triu(np.ones_like(pairs, bool), 1)
        missing += int((~pairs[above] & 1).sum())
    q = 1 - missing / comb(70, 4)
    assert multiplicity("uniform", 8, 4, 4) == pytest.approx(8 / 4 * q - 1, abs=1e-12)


def test_multiplicity_of_one_set_is_zero():
    assert multiplicity("uniform", 8, 4, 1) == multiplicity("ordered", 8, 4, 1) == 0


def test_refusals():
    rng = np.random.default_rng(0)
    for sampler in ("uniform", "ordered"):
        with pytest.raises(ValueError, match="member_order 'shared_first'.*biases"):
            sample_sets(sampler, 8, 4, 4, rng, member_order="shared_first")
    with pytest.raises(ValueError, match="6 distinct sets of 2 out of 4"):
        sample_sets("uniform", 4, 2, 7, rng)
    with pytest.raises(ValueError, match=f"{perm(4, 2)} distinct sets"):
        sample_sets("ordered", 4, 2, 13, rng)
    with pytest.raises(ValueError, match="set sampler 'other'"):
        sample_sets("other", 4, 2, 2, rng)
    with pytest.raises(ValueError, match="more than 2\\^63"):
        sample_sets("ordered", 64, 32, 4, rng)
