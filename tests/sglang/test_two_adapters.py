"""Two adapters on a real server: each level is sampled under its own, both are proved, nothing is shared between."""

from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import generate
from spiral_fast.rollout.sglang.canary import CanaryFailed
from spiral_fast.trace import AGGREGATION, SEARCH
from tests.rollout.tiny_models import trie_tokens
from tests.sglang.test_engine import adapters_on, make_engine, random_prompts, request
from tests.sglang.tiny_server import draw_adapter, load, make_config


@pytest.fixture
def loaded(model_folder):
    config = make_config(model_folder)
    model = config.model.model_copy(update={"policy": "two_adapters"})
    return load(config.model_copy(update={"model": model}))


def largest_gaps(loaded, asked, found) -> dict[str, float]:
    """To the learner's log-probs under the adapter of the level, and under the other."""
    source, gaps = PolicySource(loaded), {"own": [], "other": []}
    for one, done in zip(asked, found, strict=True):
        for role in source.roles.names:
            ours = source.log_probs(one.prompt, done.tokens, one.temperature, role)
            gaps["own" if role == source.roles.of(one.key.level) else "other"].append(np.abs(done.logp - ours).max())
    return {name: max(values) for name, values in gaps.items()}


def test_each_level_is_sampled_under_its_own_adapter(server, loaded):
    prompts, siblings, there = random_prompts(0, 5), 4, adapters_on(server)
    asked = [
        request(prompt, problem=f"p{p}", index=i, level=level, set=level - 1, temperature=0.7)
        for p, prompt in enumerate(prompts)
        for level in (SEARCH, AGGREGATION, 2)
        for i in range(siblings)
    ]
    engine = make_engine(loaded, [server], temperature=0.7)
    try:
        for version in (0, 1):  # the second has another searcher and another aggregator
            draw_adapter(loaded, seed=3 + version)
            engine.set_policy(version)
            before = adapters_on(server) - there
            assert len(before) == 2
            counts = engine.counts
            computed, prompt, leaders = counts.computed, counts.prompt, counts.leaders
            gaps = largest_gaps(loaded, asked, generate(engine, asked))
            assert gaps["own"] <= 1e-4 and gaps["other"] > 1e-2
            # levels 1 and 2 share an adapter and its cache; each prompt is computed once for each adapter, but for
            # the last token, which SGLang computes for every request
            assert counts.leaders - leaders == 2 * sum(map(len, prompts))
            assert counts.computed - computed == 2 * trie_tokens(prompts) + len(asked)
            assert counts.prompt - prompt == sum(len(one.prompt) for one in asked)
    finally:
        engine.close()
    assert adapters_on(server) == there


def test_adapters_in_each_others_place_are_noticed(server, loaded):
    class Swapped(PolicySource):
        def adapter(self, role=None):
            return super().adapter({"search": "aggregation", "aggregation": "search"}[role])

    engine = make_engine(loaded, [server])
    engine._source = Swapped(loaded)
    try:
        with pytest.raises(CanaryFailed, match="does not apply the adapter it was sent"):
            engine.set_policy(0)
    finally:
        engine.close()
