"""linear_logprob on CUDA: the cases of tests/kernels/test_linear_logprob.py and the shapes of a real vocabulary."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels import force_backend, linear_logprob
from spiral_kernels.linear_logprob import tiles
from tests.gpu.on_cuda import DEVICE, backend_fixture, cases_of, skip_without_cuda
from tests.kernels import test_linear_logprob as cases

pytestmark = pytest.mark.gpu

backend = backend_fixture(cases, "linear_logprob")
globals().update(cases_of(cases))


@pytest.fixture
def small_tiles(monkeypatch):
    for sizes, few in ((tiles.TILE_ROWS, 7), (tiles.TILE_ELEMENTS, 7 * 50), (tiles.CHUNK_BYTES, 7 * 127 * 4)):
        monkeypatch.setitem(sizes, DEVICE, few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [151936, 151937])
def test_a_real_vocabulary(vocabulary, dtype):
    """Also the last column, a common offset of 1e4 in float32, and two runs bit-equal."""
    on_cpu = cases.random_case(vocabulary, rows=257, size=128, dtype=dtype)
    on_cpu.inputs[2][:5] = vocabulary - 1
    case = cases.Case(*(x.to(DEVICE) for x in on_cpu.inputs[:3]))
    (cases.check if dtype == torch.float32 else cases.check_bfloat16)(case)
    one, two = case.run(), case.run()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (one["logp"] <= 0).all() and (one["entropy"] >= 0).all()


def test_the_pass_without_logits_agrees_with_the_pass_that_has_a_gradient():
    hidden = torch.randn(1000, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151936, 256, device=DEVICE, dtype=torch.bfloat16) * 0.1
    targets = torch.randint(151936, (1000,), device=DEVICE)
    force_backend("triton", "linear_logprob")
    try:
        with_gradient = linear_logprob(hidden, weight, targets, return_entropy=True)
        with torch.no_grad():
            without = linear_logprob(hidden, weight, targets, return_entropy=True)
    finally:
        force_backend(None, "linear_logprob")
    for one, two in zip(with_gradient, without, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


def test_more_than_two_to_the_31_logits():
    """Rows at the end are what the same rows give alone."""
    rows, vocabulary = 14_300, 151_936
    hidden = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, 64, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    few = hidden[-100:].clone().requires_grad_()
    hidden.requires_grad_()
    alone, together = linear_logprob(few, weight, targets[-100:]).logp, linear_logprob(hidden, weight, targets).logp
    torch.testing.assert_close(together[-100:], alone, rtol=0, atol=1e-2)
    (d_few,), (d_hidden,) = torch.autograd.grad(alone.sum(), few), torch.autograd.grad(together.sum(), hidden)
    assert cases.relative(d_hidden[-100:], d_few) < 1e-2


skip_without_cuda()
