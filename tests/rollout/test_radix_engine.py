from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.rollout.engine import generate
from tests.rollout.tiny_models import FAMILIES, make_engine, plain_logp, request, tiny_model, tree_prompts


def tree_requests(seed: int = 0, siblings: int = 3, **settings):
    rng = np.random.default_rng(seed)
    return [
        request(prompt, seed=100 * p + i, max_new_tokens=int(rng.integers(1, 20)), index=i, **settings)
        for p, prompt in enumerate(tree_prompts(rng))
        for i in range(siblings)
    ]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family,kv_heads", [(family, 2) for family in FAMILIES] + [("llama", 4), ("qwen3", 1)])
def test_logp_is_the_models_own(family, kv_heads, temperature):
    model = tiny_model(family, kv_heads=kv_heads)
    requests = tree_requests(temperature=temperature)
    for each, done in zip(requests, generate(make_engine(model), requests), strict=True):
        assert done.logp.dtype == np.float32
        np.testing.assert_allclose(done.logp, plain_logp(model, each, done.tokens), atol=1e-5)
