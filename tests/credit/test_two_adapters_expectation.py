"""Appendix B by exact enumeration: theta's update is M grad_theta J, phi's K (N2 - 1) grad_phi J, J(theta, phi).

The toy policy of test_expectation.py behind one frozen base: an adapter w shifts the base's logits of search actions by
S w and those of (wrong, right) below each tuple by G w, as one LoRA serves both levels. Traces of a level are sampled
under the adapter of that level.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.credit.sets import multiplicity
from tests.credit.test_expectation import drawn, expected_gradients, spiral, toy_policy, true_gradients

WIDTH = 4
N_SEARCH, SET_SIZE, N_SETS, N_AGGREGATIONS = 3, 2, 2, 2


class Toy:
    def __init__(self):
        rng = np.random.default_rng(3)
        self.base = [part.detach() for part in toy_policy(SET_SIZE)]
        self.maps = [torch.tensor(rng.normal(size=(*part.shape, WIDTH))) for part in self.base]
        self.theta, self.phi = (torch.tensor(rng.normal(size=WIDTH), requires_grad=True) for _ in range(2))

    def logits(self, theta: torch.Tensor, phi: torch.Tensor) -> list[torch.Tensor]:
        return [base + m @ w for base, m, w in zip(self.base, self.maps, (theta, phi), strict=True)]

    def through(self, of_logits) -> list[np.ndarray]:
        """Gradients of the logits of each level -> of the adapter that serves it."""
        return [
            np.tensordot(g, m.numpy(), axes=g.ndim) for g, m in zip(of_logits, self.maps, strict=True)
        ]  # (WIDTH,) each

    def expected_update(self, theta: torch.Tensor, phi: torch.Tensor) -> list[np.ndarray]:
        """(of the search term, of the aggregation term), E over all traces, sets and answers."""
        sets = drawn("uniform", N_SEARCH, SET_SIZE, N_SETS)
        logits = self.logits(theta, phi)
        return self.through(expected_gradients(*logits, N_SEARCH, N_AGGREGATIONS, sets, spiral(N_SEARCH)))

    def true_gradients(self, theta: torch.Tensor, phi: torch.Tensor) -> list[np.ndarray]:
        """grad_theta J and grad_phi J by autograd over the full sum."""
        logits = [part.detach().requires_grad_() for part in self.logits(theta, phi)]
        return self.through(true_gradients(*logits, SET_SIZE))


def factors() -> tuple[float, float]:
    return float(multiplicity("uniform", N_SEARCH, SET_SIZE, N_SETS)), N_SETS * (N_AGGREGATIONS - 1)


def test_each_adapter_climbs_the_objective_of_both():
    toy = Toy()
    updates, truth = toy.expected_update(toy.theta, toy.phi), toy.true_gradients(toy.theta, toy.phi)
    for update, gradient, factor in zip(updates, truth, factors(), strict=True):
        np.testing.assert_allclose(update, factor * gradient, rtol=0, atol=1e-12)
        assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("moved", ["theta", "phi"])
def test_what_the_other_adapter_does_enters_through_its_traces_alone(moved):
    """The formula holds wherever the other is; and there the update is another one."""
    toy = Toy()
    before = toy.expected_update(toy.theta, toy.phi)
    with torch.no_grad():
        getattr(toy, moved).mul_(-1.0)
    after, truth = toy.expected_update(toy.theta, toy.phi), toy.true_gradients(toy.theta, toy.phi)
    kept = 1 if moved == "theta" else 0
    assert np.abs(after[kept] - before[kept]).max() > 1e-3
    np.testing.assert_allclose(after[kept], factors()[kept] * truth[kept], rtol=0, atol=1e-12)


def test_one_shared_adapter_gets_the_sum_of_both_terms():
    """With theta = phi = w: d J(w, w) / d w = grad_theta J + grad_phi J, each with its factor in the update."""
    toy = Toy()
    w = toy.theta
    search, aggregation = toy.logits(w, w)
    pi, right = search.softmax(0), aggregation.softmax(-1)[..., 1]
    objective = torch.einsum("a,b,ab->", pi, pi, right)
    (total,) = torch.autograd.grad(objective, w)
    truth = toy.true_gradients(w, w)
    np.testing.assert_allclose(sum(truth), total.numpy(), rtol=0, atol=1e-12)
    expected = sum(factor * gradient for factor, gradient in zip(factors(), truth, strict=True))
    np.testing.assert_allclose(sum(toy.expected_update(w, w)), expected, rtol=0, atol=1e-12)
