"""The workload and the ideal of `bench rollout --engine sglang`, on the embedded engine."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rollout.sglang import N_AGGREGATIONS, N_SEARCH, N_SETS, NoLeaders, ideal, roll_out, work
from spiral_fast.rollout.engine import Request
from spiral_fast.rollout.sglang.leaders import encode
from spiral_fast.trace import TraceKey
from tests.rollout.tiny_models import make_engine, tiny_model


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_ideal_is_what_each_shares_with_an_earlier_one():
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 2, rng.integers(1, 9)).tolist()) for _ in range(60)]
    expected = 0
    for i, prompt in enumerate(prompts):
        best = max((shared(prompt, other) for other in prompts[:i]), default=0)
        expected += len(prompt) - min(best, len(prompt) - 1)
    assert ideal([Request(TraceKey("p", 0, -1, 0), prompt, 1, 1.0, 0) for prompt in prompts]) == expected


@pytest.mark.parametrize("barrier", [False, True])
def test_every_trace_has_its_length(barrier):
    engine = make_engine(tiny_model(), eos=())
    asked = work(2, 50, even=False)
    asked = asked._replace(search=asked.search.clip(max=5), aggregation=asked.aggregation.clip(max=7))
    asked.search[0] = 2  # complete long before the other problem
    done, add, step = [], engine.add, engine.step
    early = []  # searches that had finished when an aggregation was asked for

    def counted_step():
        done.extend(finished := step())
        return finished

    def noted_add(request):
        if request.key.level:
            early.append(len(done))
        return add(request)

    engine.add, engine.step = noted_add, counted_step
    requests = roll_out(engine, asked, barrier=barrier)
    assert len(requests) == 2 * (N_SEARCH + N_SETS * N_AGGREGATIONS)
    assert engine.counts.generated == asked.search.sum() + asked.aggregation.sum()
    assert engine.counts.prompt == sum(len(request.prompt) for request in requests)
    assert (min(early) >= 2 * N_SEARCH) == barrier


def test_without_leaders_nothing_waits():
    leaders = NoLeaders()
    prompt = encode([1, 2, 3])
    leaders.start(prompt)
    assert leaders.waits_for(encode([1, 2, 4])) is None and leaders.there(prompt) == 2
