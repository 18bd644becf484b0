"""`pytest bench/head --benchmark-only`: the head's forward and backward at a quarter of run.py's tokens."""

from __future__ import annotations

import pytest
import torch

from bench.head.peers import peers
from bench.head.run import make_inputs, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", peers())
def test_head(benchmark, name, dtype):
    tokens, size, vocabulary = 512, 576, 49152
    logp, gemms = peers()[name]
    inputs = make_inputs(tokens, size, vocabulary, dtype)
    benchmark.group = str(dtype)
    benchmark.extra_info |= {"tokens": tokens, "gflop": gemms * 2 * tokens * size * vocabulary / 1e9}
    benchmark.pedantic(step, (logp, inputs), rounds=3, warmup_rounds=1)
