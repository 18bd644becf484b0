"""Liger's kernels on CUDA: values and gradients of the learner, log-probs of the engine, beside plain modules."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.on_cuda import DEVICE, skip_without_cuda
from tests.learner.liger_cases import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"),
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_with_and_without(family, dtype, tolerance):
    check(family, dtype, DEVICE, tolerance, hidden_size=64, head_dim=16)


skip_without_cuda()
