"""policy_loss on CUDA: the cases of tests/kernels/test_policy_loss.py, and sequences longer than a block."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels import force_backend
from tests.gpu.on_cuda import DEVICE, backend_fixture, cases_of, skip_without_cuda
from tests.kernels import test_policy_loss as cases

pytestmark = pytest.mark.gpu

backend = backend_fixture(cases, "policy_loss")
globals().update(cases_of(cases, but=("test_bad_input_is_one_clear_line",)))  # its tensors lie on other devices


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", cases.SETTINGS, ids=str)
def test_long_sequences_against_the_reference(case, dtype):
    batch = cases.Batch([5000, 0, 513, 512, 1, 20000, 511], dtype=dtype)
    force_backend("reference", "policy_loss")
    expected, d_expected = batch.run(case[0], **case[1])
    for name in ("logp", "rollout", "old", "ref", "weight", "credit", "cu_seqlens"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    force_backend("triton", "policy_loss")
    try:
        found, d_found = batch.run(case[0], **case[1])
        again, d_again = batch.run(case[0], **case[1])
    finally:
        force_backend(None, "policy_loss")
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    values, true = (torch.stack(x).detach().double().cpu() for x in (found, expected))
    torch.testing.assert_close(values, true, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(d_found.cpu().double(), d_expected.double(), rtol=tolerance, atol=tolerance)
    assert torch.equal(d_found, d_again) and found == again


skip_without_cuda()
