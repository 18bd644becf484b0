"""What the expectation of the gradient estimate is, by exact enumeration over all outcomes on a toy policy.

The policy chooses one of A actions as a search trace (softmax of A parameters) and, below each ordered tuple of n
search actions, a right or wrong answer (softmax of 2 parameters per tuple). Enumerated: every tuple of N1 search
traces, every sequence of choices of the set sampler, every table of K N2 answers. No sampling anywhere.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from spiral_fast.credit.sets import multiplicity, sample_sets, shared_first
from spiral_kernels.set_advantages import set_advantages
from tests.credit.choices import distribution

N_ACTIONS = 3


def toy_policy(set_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the search actions (A,) and of (wrong, right) below each ordered tuple (A, ..., A, 2)."""
    rng = np.random.default_rng(seed)
    search = torch.tensor(rng.normal(size=N_ACTIONS), requires_grad=True)
    aggregation = torch.tensor(rng.normal(size=(*[N_ACTIONS] * set_size, 2)), requires_grad=True)
    return search, aggregation


def true_gradients(search, aggregation, set_size):
    """grad of J = E[right] with respect to both parameters, by autograd over the full sum."""
    pi, right = search.softmax(0), aggregation.softmax(-1)[..., 1]
    tuples = product(range(N_ACTIONS), repeat=set_size)
    j = sum(pi[list(actions)].prod() * right[actions] for actions in tuples)
    return [g.numpy() for g in torch.autograd.grad(j, (search, aggregation))]


def expected_gradients(search, aggregation, n_search, n_aggregations, sets_distribution):
    """E of Algorithm 1's two terms; `sets_distribution` maps tuples of member tuples to probabilities."""
    pi = search.softmax(0).detach().numpy()
    answer = aggregation.softmax(-1).detach().numpy()
    g_search, g_aggregation = np.zeros_like(pi), np.zeros_like(answer)
    for sets, p_sets in sets_distribution.items():
        n_sets = len(sets)
        tables = np.array(list(product([0.0, 1.0], repeat=n_sets * n_aggregations))).reshape(-1, n_sets, n_aggregations)
        credits = set_advantages(torch.from_numpy(tables), torch.tensor(sets).expand(len(tables), -1, -1), n_search)
        a_search, a_aggregation = credits.search.numpy(), credits.aggregation.numpy()
        for actions in product(range(N_ACTIONS), repeat=n_search):
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


def drawn(sampler, n_search, set_size, n_sets, member_order="index"):
    def sample(rng):
        sets = sample_sets(sampler, n_search, set_size, n_sets, rng, member_order=member_order)
        return tuple(sorted(map(tuple, sets.tolist())))

    return distribution(sample)


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
def test_expectation_is_m_times_the_true_gradient(sampler, member_order, n_search, set_size, n_sets, n_aggregations):
    search, aggregation = toy_policy(set_size)
    sets_distribution = drawn(sampler, n_search, set_size, n_sets, member_order)
    found = expected_gradients(search, aggregation, n_search, n_aggregations, sets_distribution)
    true = true_gradients(search, aggregation, set_size)
    m = multiplicity(sampler, n_search, set_size, n_sets)
    assert np.abs(true[0]).max() > 1e-3 and np.abs(true[1]).max() > 1e-3
    np.testing.assert_allclose(found[0], m * true[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[1], n_sets * (n_aggregations - 1) * true[1], rtol=0, atol=1e-12)


def test_shared_first_with_uniform_sets_is_biased():
    """Why that combination is refused: a trace in many sets is quoted first, one in few sets last."""
    n_search, set_size, n_sets, n_aggregations = 4, 2, 3, 2
    search, aggregation = toy_policy(set_size)
    index_order = drawn("uniform", n_search, set_size, n_sets)
    ordered = {}
    for sets, p in index_order.items():
        key = tuple(map(tuple, shared_first(np.array(sets)).tolist()))
        ordered[key] = ordered.get(key, 0) + p
    found, _ = expected_gradients(search, aggregation, n_search, n_aggregations, ordered)
    true, _ = true_gradients(search, aggregation, set_size)
    m = multiplicity("uniform", n_search, set_size, n_sets)
    best = (found @ true) / (true @ true)  # no factor at all makes it right
    assert np.abs(found - m * true).max() > 0.01 * np.abs(m * true).max()
    assert np.abs(found - best * true).max() > 1e-4 * np.abs(best * true).max()
