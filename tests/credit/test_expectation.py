"""What the expectation of the gradient estimate is, by exact enumeration over all outcomes on a toy policy.

The policy chooses one of A actions as a search trace (softmax of A parameters) and, below each ordered tuple of n
search actions, a right or wrong answer (softmax of 2 parameters per tuple). An action has a fixed reward and answer of
its own. Enumerated: every tuple of N1 search traces, every sequence of choices of the set sampler, every table of K N2
answers. No sampling anywhere.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from spiral_fast.credit.aggregator_only import aggregator_only_credits
from spiral_fast.credit.diversity import distinct_answers
from spiral_fast.credit.independent import independent_credits
from spiral_fast.credit.poly_epo import poly_epo_credits
from spiral_fast.credit.search_only import search_only_credits
from spiral_fast.credit.sets import multiplicity, sample_sets, shared_first
from spiral_kernels.set_advantages import set_advantages
from tests.credit.choices import distribution

N_ACTIONS = 3
REWARD = np.array([1.0, 0.0, 1.0])  # of each action as a search trace
ANSWER = ["4", None, "5"]


def toy_policy(set_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the search actions (A,) and of (wrong, right) below each ordered tuple (A, ..., A, 2)."""
    rng = np.random.default_rng(seed)
    search = torch.tensor(rng.normal(size=N_ACTIONS), requires_grad=True)
    aggregation = torch.tensor(rng.normal(size=(*[N_ACTIONS] * set_size, 2)), requires_grad=True)
    return search, aggregation


def gradients_of_a_set_score(search, aggregation, set_size, score):
    """grad of E score(actions of a set) with respect to both parameters, by autograd over the full sum."""
    pi = search.softmax(0)
    tuples = product(range(N_ACTIONS), repeat=set_size)
    objective = sum(pi[list(actions)].prod() * score(actions) for actions in tuples)
    parameters = (search, aggregation)
    found = torch.autograd.grad(objective, parameters, allow_unused=True)
    return [np.zeros(p.shape) if g is None else g.numpy() for p, g in zip(parameters, found, strict=True)]


def true_gradients(search, aggregation, set_size):
    """grad of J = E[an aggregation is right]."""
    right = aggregation.softmax(-1)[..., 1]
    return gradients_of_a_set_score(search, aggregation, set_size, lambda actions: right[actions])


def expected_gradients(search, aggregation, n_search, n_aggregations, sets_distribution, credits):
    """E of the two terms of the update; `sets_distribution` maps tuples of member tuples to probabilities.

    `credits(actions, sets, table)` with table (K, N2) of 0/1 gives search (N1,) and aggregation (K, N2).
    """
    pi = search.softmax(0).detach().numpy()
    answer = aggregation.softmax(-1).detach().numpy()
    g_search, g_aggregation = np.zeros_like(pi), np.zeros_like(answer)
    for sets, p_sets in sets_distribution.items():
        n_sets = len(sets)
        outcomes = list(product([0.0, 1.0], repeat=n_sets * n_aggregations))
        tables = np.array(outcomes).reshape(len(outcomes), n_sets, n_aggregations)
        for actions in product(range(N_ACTIONS), repeat=n_search):
            a_search, a_aggregation = credits(actions, sets, tables)
            quoted = [tuple(actions[i] for i in members) for members in sets]
            right = np.array([answer[tuple_][1] for tuple_ in quoted])[:, None]
            p_tables = np.where(tables > 0, right, 1 - right).prod(axis=(1, 2))
            p = float(p_sets) * pi[list(actions)].prod()
            mean_search = p * p_tables @ a_search  # (N1,)
            for action, credit in zip(actions, mean_search, strict=True):
                g_search += credit * (np.eye(N_ACTIONS)[action] - pi)
            for k, tuple_ in enumerate(quoted):
                for value in (0, 1):
                    chosen = tables[:, k] == value  # (tables, N2)
                    credit = p * (p_tables[:, None] * a_aggregation[:, k] * chosen).sum()
                    g_aggregation[tuple_] += credit * (np.eye(2)[value] - answer[tuple_])
    return g_search, g_aggregation


def spiral(n_search):
    @cache
    def of_all_tables(sets, n_aggregations):
        outcomes = list(product([0.0, 1.0], repeat=len(sets) * n_aggregations))
        tables = torch.tensor(outcomes, dtype=torch.float64).reshape(len(outcomes), len(sets), n_aggregations)
        credits = set_advantages(tables, torch.tensor(sets).expand(len(tables), -1, -1), n_search)
        return credits.search.numpy(), credits.aggregation.numpy()

    return lambda actions, sets, tables: of_all_tables(sets, tables.shape[2])


def of_each_table(credits):
    """`credits(actions, sets array, table)` of one table after the other."""

    def of_tables(actions, sets, tables):
        found = [credits(list(actions), np.array(sets), table) for table in tables]
        return tuple(np.array(part) for part in zip(*found, strict=True))

    return of_tables


def drawn(sampler, n_search, set_size, n_sets, member_order="index"):
    def sample(rng):
        sets = sample_sets(sampler, n_search, set_size, n_sets, rng, member_order=member_order)
        return tuple(sorted(map(tuple, sets.tolist())))

    return distribution(sample)


def assert_close(found, expected):
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "sampler, member_order, n_search, set_size, n_sets, n_aggregations",
    [
        ("uniform", "index", 4, 2, 2, 2),
        ("uniform", "index", 4, 2, 3, 2),
        ("uniform", "index", 3, 2, 2, 3),
        ("uniform", "index", 4, 3, 2, 2),
        ("ordered", "index", 3, 2, 2, 2),
        ("ordered", "index", 3, 2, 3, 2),
        ("ordered", "index", 4, 2, 2, 2),
        ("balanced", "index", 4, 2, 2, 2),
        ("balanced", "index", 4, 2, 4, 2),
        ("balanced", "shared_first", 4, 2, 4, 2),
        ("balanced", "shared_first", 3, 2, 3, 2),
        ("balanced", "shared_first", 4, 3, 4, 2),
    ],
)
def test_spiral_is_m_times_the_true_gradient(sampler, member_order, n_search, set_size, n_sets, n_aggregations):
    search, aggregation = toy_policy(set_size)
    sets = drawn(sampler, n_search, set_size, n_sets, member_order)
    found = expected_gradients(search, aggregation, n_search, n_aggregations, sets, spiral(n_search))
    true = true_gradients(search, aggregation, set_size)
    assert np.abs(true[0]).max() > 1e-3 and np.abs(true[1]).max() > 1e-3
    m = multiplicity(sampler, n_search, set_size, n_sets)
    assert_close(found, (m * true[0], n_sets * (n_aggregations - 1) * true[1]))


@pytest.mark.parametrize("n_search, set_size, n_sets, n_aggregations", [(3, 2, 1, 2), (3, 2, 2, 3), (3, 3, 1, 3)])
def test_aggregator_only_is_the_aggregation_term_alone(n_search, set_size, n_sets, n_aggregations):
    search, aggregation = toy_policy(set_size)
    sets = drawn("uniform", n_search, set_size, n_sets)
    credits = of_each_table(lambda actions, sets, table: aggregator_only_credits(table, sets, n_search))
    found = expected_gradients(search, aggregation, n_search, n_aggregations, sets, credits)
    _, true = true_gradients(search, aggregation, set_size)
    assert_close(found, (np.zeros(N_ACTIONS), n_sets * (n_aggregations - 1) * true))


@pytest.mark.parametrize(
    "sampler, n_search, set_size, n_sets, n_aggregations",
    [("uniform", 3, 2, 2, 1), ("uniform", 3, 1, 3, 2), ("ordered", 3, 2, 3, 1), ("balanced", 4, 2, 2, 1)],
)
def test_search_only_is_the_search_term_alone(sampler, n_search, set_size, n_sets, n_aggregations):
    search, aggregation = toy_policy(set_size)
    sets = drawn(sampler, n_search, set_size, n_sets)
    credits = of_each_table(lambda actions, sets, table: search_only_credits(table, sets, n_search))
    found = expected_gradients(search, aggregation, n_search, n_aggregations, sets, credits)
    true, _ = true_gradients(search, aggregation, set_size)
    assert_close(found, (multiplicity(sampler, n_search, set_size, n_sets) * true, np.zeros(aggregation.shape)))


@pytest.mark.parametrize("n_search, set_size, n_sets, n_aggregations", [(3, 2, 1, 2), (3, 2, 2, 2), (2, 2, 1, 3)])
def test_independent_is_the_gradient_of_two_objectives(n_search, set_size, n_sets, n_aggregations):
    search, aggregation = toy_policy(set_size)
    sets = drawn("uniform", n_search, set_size, n_sets)
    credits = of_each_table(lambda actions, sets, table: independent_credits(REWARD[actions], table, sets))
    found = expected_gradients(search, aggregation, n_search, n_aggregations, sets, credits)
    own, _ = gradients_of_a_set_score(search, aggregation, 1, lambda action: REWARD[action[0]])
    of_j, true = true_gradients(search, aggregation, set_size)
    assert np.abs(own - of_j).max() > 1e-2  # search does not learn for J
    assert_close(found, ((n_search - 1) * own, n_sets * (n_aggregations - 1) * true))


def lengths_differ(answers, texts):
    """A diversity that is no rational number."""
    return float(np.std([len(text) for text in texts])) + 0.1


@pytest.mark.parametrize("diversity", [distinct_answers, lengths_differ])
@pytest.mark.parametrize(
    "sampler, n_search, set_size, n_sets",
    [("uniform", 4, 2, 2), ("uniform", 4, 2, 6), ("uniform", 4, 3, 3), ("balanced", 4, 2, 2), ("balanced", 4, 3, 4)],
)
def test_poly_epo_is_m_times_the_gradient_of_the_polychromic_objective(sampler, n_search, set_size, n_sets, diversity):
    search, aggregation = toy_policy(set_size)
    sets = drawn(sampler, n_search, set_size, n_sets)

    def d(actions):
        return diversity([ANSWER[a] for a in actions], ["x" * a for a in actions])

    def credits(actions, sets, table):
        values = [d([actions[i] for i in members]) for members in sets]
        return poly_epo_credits(REWARD[actions], sets, values), np.zeros((len(sets), 0))

    found = expected_gradients(search, aggregation, n_search, 0, sets, of_each_table(credits))
    true = gradients_of_a_set_score(
        search, aggregation, set_size, lambda actions: REWARD[list(actions)].mean() * float(d(actions))
    )
    assert np.abs(true[0]).max() > 1e-2
    assert_close(found, (multiplicity(sampler, n_search, set_size, n_sets) * true[0], true[1]))


def test_shared_first_with_uniform_sets_is_biased():
    """Why that combination is refused: a trace in many sets is quoted first, one in few sets last."""
    n_search, set_size, n_sets, n_aggregations = 4, 2, 3, 2
    search, aggregation = toy_policy(set_size)
    index_order = drawn("uniform", n_search, set_size, n_sets)
    ordered = {}
    for sets, p in index_order.items():
        key = tuple(map(tuple, shared_first(np.array(sets)).tolist()))
        ordered[key] = ordered.get(key, 0) + p
    found, _ = expected_gradients(search, aggregation, n_search, n_aggregations, ordered, spiral(n_search))
    true, _ = true_gradients(search, aggregation, set_size)
    m = multiplicity("uniform", n_search, set_size, n_sets)
    best = (found @ true) / (true @ true)  # no factor at all makes it right
    assert np.abs(found - m * true).max() > 0.01 * np.abs(m * true).max()
    assert np.abs(found - best * true).max() > 1e-4 * np.abs(best * true).max()
