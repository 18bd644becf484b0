"""linear_policy_loss on CUDA: the cases of tests/kernels/test_linear_policy_loss.py and a real vocabulary."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels import available_backends, force_backend
from spiral_kernels.linear_logprob import tiles
from tests.gpu.on_cuda import DEVICE, backend_fixture, cases_of, moved, skip_without_cuda
from tests.kernels import test_linear_policy_loss as cases

pytestmark = pytest.mark.gpu

backend = backend_fixture(cases, "linear_policy_loss")
globals().update(cases_of(cases, but=("test_bad_input_is_one_clear_line",)))  # its tensors lie on other devices


@pytest.fixture
def small_tiles(monkeypatch):
    for sizes, few in ((tiles.TILE_ROWS, 7), (tiles.TILE_ELEMENTS, 7 * 50), (tiles.CHUNK_BYTES, 7 * 127 * 4)):
        monkeypatch.setitem(sizes, DEVICE, few)


@pytest.mark.parametrize("vocabulary", [151936, 151937])
def test_a_real_vocabulary(vocabulary, monkeypatch):
    monkeypatch.setattr(cases, "linear_policy_loss", moved(cases.linear_policy_loss))
    for name, why_not in available_backends("linear_policy_loss", DEVICE).items():
        if why_not is None:
            force_backend(name, "linear_policy_loss")
            try:
                cases.check(cases.Case(vocabulary), **cases.SETTINGS[-1])
            finally:
                force_backend(None, "linear_policy_loss")


def test_a_frozen_head_gets_no_gradient_and_memory_does_not_grow_with_the_logits():
    hidden = torch.randn(8192, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151936, 256, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.zeros(8192, device=DEVICE)
    targets = torch.zeros(8192, device=DEVICE, dtype=torch.int64)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cases.linear_policy_loss(hidden, weight, targets, rows + 1, rows - 12, rows + 1).loss.backward()
    assert weight.grad is None and hidden.grad.isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < 8192 * 151936 * 4 / 3  # the logits in float32: 5 GB


skip_without_cuda()
