"""`pytest bench/rollout --benchmark-only`: one two-stage rollout of the demo model, each contender."""

from __future__ import annotations

import pytest
import torch

from bench.rollout.run import CASES, CONTENDERS, load, two_stage

CASE = CASES["parts float32"]


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(CASE)
    torch.set_num_threads(threads)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONTENDERS)
def test_two_stage(benchmark, model, name):
    contender = CONTENDERS[name](model)
    generated = benchmark.pedantic(
        two_stage, (contender, CASE, model.config.vocab_size), setup=contender.reset, rounds=5, warmup_rounds=1
    )
    benchmark.extra_info["generated_tokens"] = generated
    assert generated == CASE.problems * (8 * CASE.search_new + 16 * CASE.aggregation_new)
