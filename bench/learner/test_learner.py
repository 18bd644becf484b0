"""`pytest bench/learner --benchmark-only`: one step of each contender on the same rollouts."""

from __future__ import annotations

import pytest
import torch

from bench.learner.run import ALL_LIVE, CASES, contenders


@pytest.fixture(scope="module", params=CASES)
def case(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param, *contenders(CASES[request.param])
    torch.set_num_threads(threads)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ALL_LIVE)
def test_step(benchmark, case, name):
    label, found, _, rollouts = case
    rows = rollouts.all_live
    benchmark.group = label
    step = benchmark.pedantic(found[name], (rows,), rounds=3, warmup_rounds=1)
    benchmark.extra_info |= {"tokens": step.tokens, "flop": step.flop}
    rounding = 0.1 if "bfloat16" in label else 1e-3
    assert step.gradient_norm == pytest.approx(found["flat"](rows).gradient_norm, rel=rounding)
