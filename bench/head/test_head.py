"""`pytest bench/head --benchmark-only`: the head's forward and backward at a quarter of run.py's tokens."""

from __future__ import annotations

import pytest
import torch

from bench.head.run import KINDS, make_inputs

METHODS = [(what, name) for what, (_step, methods_of) in KINDS.items() for name in methods_of()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("what", "name"), METHODS)
def test_head(benchmark, what, name, dtype):
    tokens, size, vocabulary = 512, 576, 49152
    step, methods_of = KINDS[what]
    method, inputs = methods_of()[name], make_inputs(tokens, size, vocabulary, dtype)
    benchmark.group = f"{what}, {dtype}"
    benchmark.extra_info |= {"tokens": tokens, "gflop": method.gemms * 2 * tokens * size * vocabulary / 1e9}
    benchmark.pedantic(step, (method, inputs), rounds=3, warmup_rounds=1)
