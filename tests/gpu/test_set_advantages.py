"""set_advantages on CUDA; tests/kernels/test_set_advantages.py has its truths there too."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels import force_backend, set_advantages
from tests.gpu.on_cuda import DEVICE, skip_without_cuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_as_on_the_cpu_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    problems = 20_000
    rewards = torch.randint(0, 2, (problems, 5, 3), generator=generator).to(dtype)
    sets = torch.rand(problems, 5, 8, generator=generator).argsort(-1)[..., :4].contiguous()
    lengths = {
        "search_length": torch.randint(1, 100, (problems, 8), generator=generator),
        "aggregation_length": torch.randint(1, 100, (problems, 5, 3), generator=generator),
    }
    targets = {"search_target": 60, "aggregation_target": 60}
    expected = set_advantages(rewards, sets, 8, **lengths, **targets)
    force_backend("triton", "set_advantages")
    try:
        on_gpu = {name: x.to(DEVICE) for name, x in lengths.items()}
        found = set_advantages(rewards.to(DEVICE), sets.to(DEVICE), 8, **on_gpu, **targets)
    finally:
        force_backend(None, "set_advantages")
    for mine, true in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu(), true)


skip_without_cuda()
