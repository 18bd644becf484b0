"""pytest bench/rollout --benchmark-only: one two-stage rollout of the demo-sized model per round, each contender."""

from __future__ import annotations

import pytest

from bench.rollout.two_stage import CONTENDERS, SHAPES, load, two_stage


@pytest.fixture(scope="module")
def model():
    return load("demo", "float32")


@pytest.mark.parametrize("name", CONTENDERS)
def test_two_stage(benchmark, model, name):
    contender = CONTENDERS[name](model)
    shape = SHAPES["demo"]
    generated = benchmark.pedantic(
        two_stage,
        (contender, shape, model.config.vocab_size),
        setup=contender.reset,
        rounds=5,
        warmup_rounds=1,
    )
    benchmark.extra_info["generated_tokens"] = generated
    assert generated == shape.problems * (8 * shape.search_new + 16 * shape.aggregation_new)
