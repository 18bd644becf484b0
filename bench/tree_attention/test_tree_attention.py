"""`pytest bench/tree_attention --benchmark-only`: forward and backward of a small tree in every way."""

from __future__ import annotations

import pytest
import torch

from bench.tree_attention.cases import make_case, spiral
from bench.tree_attention.peers import peers
from bench.tree_attention.run import _results, _step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", peers())
def test_tree_attention(benchmark, name, dtype):
    case = make_case(spiral(64, 8, 48), "SmolLM2", dtype)
    function = peers()[name](case)
    benchmark.group = str(dtype)
    benchmark.extra_info |= {"rows": len(case.q), "visited_gflop": 3.5 * case.forward_flops / 1e9}
    benchmark.pedantic(_step, (function,), rounds=3, warmup_rounds=1)
    truth = next(iter(peers().values()))(case)
    mine, true = _results(case, function())[0], _results(case, truth())[0]
    assert (mine - true).abs().max() <= 0.05 * true.abs().max()
    torch.compiler.reset()
