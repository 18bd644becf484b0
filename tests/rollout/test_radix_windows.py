"""The embedded engine on models with sliding windows, against transformers' eager forward with its own masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.rows import Row
from spiral_fast.rollout.engine import generate
from spiral_fast.rollout.make_engine import make_engine as engine_of_config
from tests.learner.test_windows import loaded, peft_model
from tests.learner.tiny import CONTEXT, VOCABULARY, WINDOW, WINDOWED, config
from tests.rollout.tiny_models import check_counts, make_engine, plain_logp, request, trie_tokens


def requests_longer_than_the_window() -> list:
    """Prompts that share what lies behind the window and what lies within it, of one token up to ten windows."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(2, VOCABULARY, n).tolist()  # noqa: E731
    stem = draw(3 * WINDOW)
    prompts = [draw(1), draw(WINDOW - 1), draw(WINDOW), draw(WINDOW + 1), stem, [*stem, *draw(7)], [*stem, *draw(50)]]
    return [
        request(prompt, seed=10 * p + i, max_new_tokens=int(rng.integers(1, 3 * WINDOW)), index=i)
        for p, prompt in enumerate(prompts)
        for i in range(3)
    ]


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by the native kernels, by torch
@pytest.mark.parametrize("family", WINDOWED)
def test_logp_is_the_models_own(family, dtype, chunk):
    model = peft_model(family, ATTENTION, dtype)
    engine = make_engine(model, eos=(), max_context=CONTEXT, prefill_chunk=chunk, max_running=8)
    requests = requests_longer_than_the_window()
    completions = generate(engine, requests)
    check_counts(engine, requests, completions)
    assert engine.counts.computed == trie_tokens(each.prompt for each in requests)
    assert engine._pool.held == engine._tree.size
    for each, done in zip(requests, completions, strict=True):
        np.testing.assert_allclose(done.logp, plain_logp(model, each, done.tokens), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", WINDOWED)
def test_engine_and_learner_agree_and_learn(family):
    parts = loaded(family)
    engine = make_engine(parts.model, eos=(), max_context=CONTEXT)
    learner = Learner(config(sharing="none"), parts)
    requests = requests_longer_than_the_window()
    for version in (1, 2):
        rows = [
            Row(list(each.prompt), done.tokens, done.logp, 0.5 - i % 2, 0.1, i % 2)
            for i, (each, done) in enumerate(zip(requests, generate(engine, requests), strict=True))
        ]
        stats = learner.step(rows)
        assert stats.logp_gap_max < 1e-6 and not stats.skipped_reason
        engine.set_policy(version)


def test_a_small_budget_changes_no_trace():
    model = peft_model("qwen2", ATTENTION)
    requests = requests_longer_than_the_window()
    plenty = generate(make_engine(model, eos=(), max_context=CONTEXT), requests)
    scarce = generate(make_engine(model, eos=(), max_context=CONTEXT, cache_tokens=120), requests)
    assert [done.tokens for done in scarce] == [done.tokens for done in plenty]


def test_sglang_is_refused_for_windows():
    base = config()
    settings = base.model_copy(update={"rollout": base.rollout.model_copy(update={"engine": "sglang"})})
    with pytest.raises(ConfigError, match="sliding window.*set rollout.engine: radix"):
        engine_of_config(settings, loaded("mistral", torch.float32))
