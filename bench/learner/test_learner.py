"""`pytest bench/learner --benchmark-only`: one step of each contender, packed and padded."""

from __future__ import annotations

import pytest
import torch

from bench.learner.run import CASES, contenders, floor_flop


@pytest.fixture(scope="module", params=CASES)
def case(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param, *contenders(CASES[request.param])
    torch.set_num_threads(threads)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["packed (ours)", "padded, sorted", "padded, batch order (TRL)"])
def test_step(benchmark, case, name):
    label, found, loaded, rows = case
    benchmark.group = label
    benchmark.extra_info |= {
        "tokens": sum(row.computed_tokens for row in rows),
        "gflop": floor_flop(loaded.model, rows) / 1e9,
    }
    norm = benchmark.pedantic(found[name], (rows,), rounds=3, warmup_rounds=1)
    assert norm == pytest.approx(found["packed (ours)"](rows), rel=0.1 if "bfloat16" in label else 1e-3)
