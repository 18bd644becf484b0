"""`pytest bench/head --benchmark-only`: a policy loss and its gradient at a quarter of loss.py's tokens."""

from __future__ import annotations

import pytest
import torch

from bench.head.loss import losses, step
from bench.head.run import make_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", losses())
def test_loss(benchmark, name, dtype):
    tokens, size, vocabulary = 512, 576, 49152
    inputs = make_inputs(tokens, size, vocabulary, dtype)
    rollout_logp = torch.full((tokens,), -10.0)
    benchmark.group = str(dtype)
    benchmark.extra_info |= {"tokens": tokens, "gflop_of_two_gemms": 2 * 2 * tokens * size * vocabulary / 1e9}
    benchmark.pedantic(step, (losses()[name], inputs, rollout_logp), rounds=3, warmup_rounds=1)
