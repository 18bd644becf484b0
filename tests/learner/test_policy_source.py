from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from spiral_fast.learner.policy_source import PolicySource
from tests.learner.tiny import RAGGED, base_model, loaded, plain_log_probs, plain_peft


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_log_probs_are_those_of_plain_transformers(family, temperature):
    source, truth = PolicySource(loaded(family)), plain_peft(family)
    for row in RAGGED:
        found = source.log_probs(row.prompt, row.tokens, temperature)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, plain_log_probs(truth, row, temperature).detach(), rtol=0, atol=2e-6)
        with truth.disable_adapter():
            expected = plain_log_probs(truth, row, temperature).detach()
        np.testing.assert_allclose(source.base_log_probs(row.prompt, row.tokens, temperature), expected, atol=2e-6)


def test_adapter_makes_the_same_model_in_plain_peft():
    source = PolicySource(loaded(dtype=torch.float32))
    sent = source.adapter()
    config = LoraConfig(**json.loads(json.dumps(sent.config)))
    assert (config.r, config.lora_alpha) == (4, 6.0)
    base = base_model("qwen3", torch.float32)
    base.set_attn_implementation("plain")
    again = get_peft_model(base, config).eval()
    outcome = set_peft_model_state_dict(again, sent.tensors)
    assert not outcome.unexpected_keys and not [key for key in outcome.missing_keys if "lora_" in key]
    row = RAGGED[0]
    expected = plain_log_probs(again, row, 0.7).detach()
    np.testing.assert_allclose(source.log_probs(row.prompt, row.tokens, 0.7), expected, rtol=0, atol=1e-5)


def test_tensors_are_copies():
    parts = loaded(dtype=torch.float32)
    source = PolicySource(parts)
    first = source.adapter()
    kept = {name: tensor.clone() for name, tensor in first.tensors.items()}
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            if "lora_" in name:
                parameter.add_(1.0)
    second = source.adapter()
    assert first.tensors.keys() == second.tensors.keys() == kept.keys() and len(kept) == 28
    for name, tensor in first.tensors.items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        assert torch.equal(tensor, kept[name])
        assert torch.equal(second.tensors[name], kept[name] + 1.0)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in first.tensors.values()}
    assert len(pointers) == len(kept)


def test_linears_are_all_linear_layers_of_the_decoder():
    model = loaded().causal_lm.config
    found = PolicySource(loaded()).adapter().linears
    heads, groups = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    width, inner = model.hidden_size, model.intermediate_size
    expected = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (groups, width),
        "self_attn.v_proj": (groups, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    names = {f"base_model.model.model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in expected.items()}
    assert found == names


FSDP = """
import torch
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.policy_source import PolicySource
from tests.learner.tiny import *

parts = loaded(dtype=torch.float32)
source, row = PolicySource(parts), RAGGED[0]

def state():
    return [*source.adapter().tensors.values()] + [
        torch.from_numpy(f(row.prompt, row.tokens, 0.7)) for f in (source.log_probs, source.base_log_probs)
    ]

def same(a, b):
    return len(a) == len(b) == 30 and all(torch.equal(x, y) for x, y in zip(a, b))

whole = state()
learner = Learner(config(fsdp=True), parts)
sharded = state()
assert same(whole, sharded)
with learner.rollout_weights():
    assert same(whole, state())
plain = Learner(config(), loaded(dtype=torch.float32))
for one in (learner, plain):  # after it was read the learner still trains as before
    one.step(RAGGED)
assert largest_difference(weights(learner), weights(plain)) < 1e-6
assert not torch.equal(state()[-2], whole[-2])  # the weights as they are now
assert torch.equal(state()[-1], whole[-1])
"""


def test_reads_a_sharded_model():
    done = subprocess.run([sys.executable, "-c", FSDP], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
