"""set_advantages in Triton against the other backends: test_set_advantages_triton.py runs this in its interpreter.

A program takes some 30 ms there, so the batches are small.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_kernels import force_backend
from spiral_kernels.set_advantages import flat_set_advantages, set_advantages
from spiral_kernels.set_advantages import triton as kernels
from tests.kernels.test_set_advantages import check_against_fractions, flat, ragged_problems, random_sets

OTHERS = ("numba", "torch")


@pytest.fixture
def triton():
    force_backend("triton", "set_advantages")
    yield
    force_backend(None, "set_advantages")


@pytest.fixture
def small_blocks(monkeypatch):
    for name in ("TRACES", "MEMBERS", "REWARDS"):
        monkeypatch.setattr(kernels, name, 2)


def by_backend(backend, run):
    force_backend(backend, "set_advantages")
    try:
        return run()
    finally:
        force_backend(None, "set_advantages")


def compare(run, exact: bool) -> None:
    found = by_backend("triton", run)
    for other in OTHERS:
        for one, two in zip(found, by_backend(other, run), strict=True):
            assert torch.equal(one == 0, two == 0)
            if exact:
                assert torch.equal(one, two)
            else:
                torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@settings(max_examples=10, deadline=None)
@given(ragged_problems(), st.sampled_from([torch.float64, torch.float32, torch.int64]))
def test_0_1_rewards_bit_for_bit(problems, dtype):
    compare(lambda: flat_set_advantages(*flat(problems, dtype=dtype)), exact=True)


@settings(max_examples=12, deadline=None)
@given(ragged_problems(), st.integers(0, 1000), st.sampled_from([1e-6, 0.1, 1e6]))
def test_real_rewards_have_the_same_zeros(problems, seed, size):
    """Tenths: sums that are equal in decimals and not in floats."""
    rewards, *others = flat(problems)
    rewards = size * torch.randint(-3, 4, rewards.shape, generator=torch.Generator().manual_seed(seed)).double()
    compare(lambda: flat_set_advantages(rewards, *others), exact=False)


@settings(max_examples=10, deadline=None)
@given(ragged_problems(), st.integers(0, 3), st.integers(0, 3))
def test_the_gate(problems, search_target, aggregation_target):
    rewards, *others = flat(problems)
    lengths = {
        "search_length": torch.arange(int(others[3][-1])) % 5,
        "aggregation_length": torch.arange(len(rewards)) % 5,
    }
    targets = {"search_target": search_target, "aggregation_target": aggregation_target}
    compare(lambda: flat_set_advantages(rewards, *others, **lengths, **targets), exact=True)


@settings(max_examples=10, deadline=None)
@given(ragged_problems())
def test_more_than_one_block(problems):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRACES", "MEMBERS", "REWARDS"):
            patch.setattr(kernels, name, 2)
        compare(lambda: flat_set_advantages(*flat(problems)), exact=True)


@pytest.mark.parametrize("n_sets, n_aggregations", [(6, 3), (5, 5)])
def test_against_fractions(triton, n_sets, n_aggregations):
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (10, n_sets, n_aggregations)).astype(np.float64)
    check_against_fractions("cpu", rewards, random_sets(rng, 10, 8, 4, n_sets), 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes(dtype):
    rng = np.random.default_rng(2)
    rewards, sets = torch.tensor(rng.integers(0, 2, (4, 6, 3))).to(dtype), torch.tensor(random_sets(rng, 4, 8, 4, 6))
    compare(lambda: set_advantages(rewards, sets, 8), exact=True)


def test_members_of_another_problem_and_twice(triton, small_blocks):
    rewards, sets = torch.zeros(2, 2, 2), torch.tensor([[[0, 1, 4], [1, 2, 3]]] * 2)
    set_advantages(rewards, sets, 5)
    for bad in (-1, 5, 2**40):
        with pytest.raises(ValueError, match="a trace of another problem"):
            set_advantages(rewards, torch.where(sets == 4, bad, sets), 5)
    with pytest.raises(ValueError, match="the same trace twice"):
        set_advantages(rewards, torch.where(sets == 4, 0, sets), 5)


def test_no_problems(triton):
    found = set_advantages(torch.zeros(0, 4, 2), torch.zeros(0, 4, 2, dtype=torch.int64), 8)
    assert [list(field.shape) for field in found] == [[0, 8], [0, 4, 2], [0, 4], [0, 8]]
