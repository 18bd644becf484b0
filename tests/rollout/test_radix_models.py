"""The embedded engine: models it refuses, bfloat16, FSDP."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.learner import fsdp
from spiral_fast.learner.policy import Policy
from spiral_fast.rollout.engine import generate
from tests.rollout.tiny_models import (
    make_engine,
    plain_logp,
    request,
    tiny_model,
    tree_requests,
)


def test_attention_implementation_is_named():
    model = tiny_model()
    model.get_base_model().set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=f"'sdpa'; call set_attn_implementation\\('{ATTENTION}'\\)"):
        make_engine(model)


def small_qwen2(**changes):
    settings = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    model = Qwen2ForCausalLM(Qwen2Config(**settings | {"num_key_value_heads": 2} | changes))
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.mark.parametrize(
    "changes,words",
    [
        (
            dict(layer_types=["full_attention", "linear_attention", "full_attention", "full_attention"]),
            r"layer_types\[1\] = 'linear_attention'",
        ),
        (
            dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type = 'dynamic'",
        ),
    ],
)
def test_models_it_cannot_serve(changes, words):
    with pytest.raises(ValueError, match=words):
        make_engine(small_qwen2(**changes))


def test_dropout_is_named():
    model = small_qwen2()
    model.model.layers[1].mlp.drop = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="dropout 0.1 in 'model.layers.1.mlp.drop'"):
        make_engine(model)


def test_yarn_is_served():
    """Its frequencies are fixed by the config."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    model = tiny_model("llama", rope_parameters=rope)
    each = request(range(2, 50), max_new_tokens=8)
    done = generate(make_engine(model), [each])[0]
    np.testing.assert_allclose(done.logp, plain_logp(model, each, done.tokens), rtol=0, atol=1e-5)


def test_bfloat16_stays_near_the_plain_forward():
    model = tiny_model(dtype=torch.bfloat16)
    requests = tree_requests()
    gaps = [
        np.abs(done.logp - plain_logp(model, each, done.tokens)).mean()
        for each, done in zip(requests, generate(make_engine(model), requests), strict=True)
    ]
    assert np.mean(gaps) < 0.03


def test_under_fsdp():
    """Sharded at world size 1, whole while it samples: the same bits, again after a return to shards."""
    model = tiny_model()
    requests = tree_requests(siblings=1)
    plain = generate(make_engine(model), requests)
    policy = Policy(model)
    fsdp.shard(policy, torch.device("cpu"))
    engine = make_engine(model, watch_weights=False)
    for version in (1, 2):
        with fsdp.unsharded(policy):
            sharded = generate(engine, requests)
        for one, two in zip(plain, sharded, strict=True):
            assert one.tokens == two.tokens and np.array_equal(one.logp, two.logp)
        engine.set_policy(version)
