"""The embedded engine: a new policy version never reads the keys and values of an older one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from spiral_fast.rollout.engine import generate
from tests.rollout.tiny_models import (
    make_engine,
    plain_logp,
    redraw_lora,
    request,
    tiny_model,
    tree_requests,
)


@pytest.fixture(scope="module")
def exact_model():
    """float64: batching cannot change a token."""
    return tiny_model(dtype=torch.float64)


def in_place(model):
    redraw_lora(model, 99)


def optimiser_step(model):
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(trainable, lr=0.1).step()


def load_state(model):
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items() if "lora_" in k}, strict=False)


def other_adapter(model):
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.to(torch.float64)
    model.set_adapter("other")
    redraw_lora(model, 42)


UPDATES = [in_place, optimiser_step, load_state, other_adapter]


@pytest.mark.parametrize("update", UPDATES)
def test_a_new_version_reads_no_older_keys(update):
    model = tiny_model(dtype=torch.float64)
    engine = make_engine(model)
    requests = tree_requests(siblings=1)
    old = generate(engine, requests)
    update(model)
    engine.set_policy(1)
    warm, cold = generate(engine, requests), generate(make_engine(model), requests)
    assert warm[0].cached_tokens == 0
    for each, a, b in zip(requests, warm, cold, strict=True):
        assert a.tokens == b.tokens and np.array_equal(a.logp, b.logp) and a.policy_version == 1
        assert a.cached_tokens == b.cached_tokens
        np.testing.assert_allclose(a.logp, plain_logp(model, each, a.tokens), rtol=0, atol=1e-6)
    assert any(a.tokens != b.tokens for a, b in zip(old, warm, strict=True))


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_without_set_policy_is_noticed(update):
    model = tiny_model(dtype=torch.float64)
    engine = make_engine(model, eos=())
    generate(engine, [request([2, 3])])
    update(model)
    engine.add(request([2, 3]))
    with pytest.raises(RuntimeError, match="changed under policy version 0; call set_policy"):
        engine.step()


def test_an_update_under_a_running_request_is_noticed():
    model = tiny_model()
    engine = make_engine(model, eos=())
    for n in (1, 20):
        engine.add(request([2, 3], max_new_tokens=n))
    assert len(engine.step()) == 1
    redraw_lora(model, 5)
    with pytest.raises(RuntimeError, match="set_policy"):
        engine.step()
    assert engine.step() == [] and engine._pool.held == 0  # nothing pending, nothing cached: set_policy may be called
    engine.set_policy(1)
    each = request([2, 3], max_new_tokens=20)
    warm, cold = generate(engine, [each])[0], generate(make_engine(model, eos=()), [each])[0]
    assert warm.policy_version == 1 and warm.tokens == cold.tokens and np.array_equal(warm.logp, cold.logp)


def test_set_policy_waits_for_nobody(exact_model):
    engine = make_engine(exact_model, eos=())
    engine.add(request([2, 3], max_new_tokens=3))
    with pytest.raises(RuntimeError, match="1 requests queued or running"):
        engine.set_policy(1)
    engine.add(request([2, 3], max_new_tokens=1))
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests queued or running"):
        engine.set_policy(1)
    assert engine.step()[0][1].policy_version == 0
    engine.set_policy(1)
    assert generate(engine, [request([2, 3])])[0].policy_version == 1
