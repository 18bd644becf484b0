"""Two adapters in the embedded engine: each request under the one of its level, nothing shared between them."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch

from spiral_fast.batch_invariant import check_possible
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import Request, generate
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.trace import AGGREGATION, SEARCH, TraceKey
from tests.learner.test_two_adapters import loaded_two, role_of
from tests.learner.tiny import CONTEXT, VOCABULARY, config


def make_engine(parts, **changes) -> RadixEngine:
    settings = dict(max_context=CONTEXT, max_running=64, prefill_chunk=16, cache_tokens=5000) | changes
    return RadixEngine(parts.causal_lm, frozenset([1]), roles=parts.roles, **settings)


def requests(siblings: int = 3, temperature: float = 0.7) -> list[Request]:
    """Of each level, on prompts that both levels share and that continue each other."""
    rng = np.random.default_rng(0)
    template = rng.integers(2, VOCABULARY, 5).tolist()
    prompts = [template, *(template + rng.integers(2, VOCABULARY, n).tolist() for n in (1, 9, 20))]
    return [
        Request(TraceKey(f"p{p}", level, level - 1, i), tuple(prompt), 4 + 5 * i, temperature, 100 * p + 10 * level + i)
        for p, prompt in enumerate(prompts)
        for level in (SEARCH, AGGREGATION, 2)
        for i in range(siblings)
    ]


def as_rows(asked, done) -> list[Row]:
    return [
        Row(list(one.prompt), out.tokens, out.logp, 1.0, 1.0, one.key.level)
        for one, out in zip(asked, done, strict=True)
    ]


@pytest.mark.parametrize("max_running", [2, 64])
def test_log_probs_are_the_learners_under_the_adapter_of_the_level(max_running):
    parts, asked = loaded_two(torch.float32), requests()
    rows = as_rows(asked, generate(make_engine(parts, max_running=max_running), asked))
    learner, source = Learner(config(0.7), parts), PolicySource(parts)
    for row, logp in zip(rows, learner.log_probs(rows), strict=True):
        np.testing.assert_allclose(row.rollout_logp, logp, rtol=0, atol=2e-5)
        right, wrong = (source.log_probs(row.prompt, row.tokens, 0.7, role) for role in (role_of(row), other(row)))
        assert np.abs(right - row.rollout_logp).max() < 2e-5 < 1e-2 < np.abs(wrong - row.rollout_logp).max()


def other(row: Row) -> str:
    return {"search": "aggregation", "aggregation": "search"}[role_of(row)]


@pytest.mark.parametrize("role, level", [("aggregation", SEARCH), ("search", AGGREGATION)])
def test_another_adapter_of_one_role_changes_no_trace_of_the_other(role, level):
    """Together in one engine, whose version is new; to the last bit."""
    parts, asked = loaded_two(torch.float32), requests()
    engine = make_engine(parts)
    first = generate(engine, asked)
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            if f".{role}." in name:
                parameter.mul_(1.5)
    engine.set_policy(1)
    changed = False
    for one, before, after in zip(asked, first, generate(engine, asked), strict=True):
        if (one.key.level == SEARCH) == (level == SEARCH):
            assert before.tokens == after.tokens and np.array_equal(before.logp, after.logp)
        else:
            changed |= before.tokens != after.tokens
    assert changed


def test_no_node_of_the_tree_serves_both():
    """Every distinct prefix of an adapter's prompts is computed for that adapter, and once."""
    parts, asked = loaded_two(torch.float32), requests()
    engine = make_engine(parts)
    generate(engine, asked)
    of_role = sorted((parts.roles.of(one.key.level), one.prompt) for one in asked)
    expected = {(role, prompt[:n]) for role, prompt in of_role for n in range(1, len(prompt) + 1)}
    assert engine._tree.size == engine.counts.computed == len(expected)
    assert len(list(groupby(of_role, key=lambda pair: pair[0]))) == len(engine._tree.roots) == 2


def test_a_full_cache_makes_room_whichever_adapter_asks():
    parts, asked = loaded_two(torch.float32), requests()
    for one in asked:  # one after the other: each finds the other adapter's prompts in its way
        engine = make_engine(parts, cache_tokens=len(one.prompt) + one.max_new_tokens)
        for level in (SEARCH, AGGREGATION, SEARCH):
            key = TraceKey("p", level, level - 1, 0)
            (done,) = generate(engine, [Request(key, one.prompt, one.max_new_tokens, 1.0, one.seed)])
            assert done.computed_tokens == len(one.prompt)
        assert engine._pool.held == engine._tree.size


def test_a_step_is_one_forward_for_each_adapter_that_has_rows():
    parts, seen = loaded_two(torch.float32), []
    parts.causal_lm.get_decoder().register_forward_pre_hook(lambda *_: seen.append(parts.roles.active))
    generate(make_engine(parts), [one for one in requests(1) if one.key.level == SEARCH])
    assert set(seen) == {"search"}
    seen.clear()
    generate(make_engine(parts, prefill_chunk=4096), requests(1))
    assert seen[:4] == ["search", "aggregation"] * 2 and len(seen) == 2 * 4  # a prefill, then a step a token


def test_batch_invariant_both_have_the_bits_of_the_learner():
    parts = loaded_two(torch.float32)
    try:
        check_possible(parts.causal_lm)
    except ValueError as error:
        pytest.skip(str(error))
    asked = requests()
    rows = as_rows(asked, generate(make_engine(parts, batch_invariant=True), asked))
    settings = config(0.7)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"batch_invariant": True})})
    for row, logp in zip(rows, Learner(settings, parts).log_probs(rows), strict=True):
        assert np.array_equal(row.rollout_logp, logp)
