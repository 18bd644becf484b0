"""Architectures, tiny and random: computed exactly by learner and engine, or refused by name in both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import load_model
from spiral_fast.rollout.engine import generate
from spiral_fast.supported import UnsupportedModel, check_config
from tests.learner.tiny import CONTEXT, RAGGED, VOCABULARY, config, plain_log_probs, save_tokenizer
from tests.rollout.tiny_models import make_engine, plain_logp, request

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
)
OF_FAMILY = {
    "opt": {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": {"rotary_dim": 4},
}


def random_model(family: str, dtype=torch.float32, **changes):
    settings = SIZES | OF_FAMILY.get(family, {}) | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    return model


def saved(family: str, folder, **changes) -> str:
    random_model(family, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {}),  # its classifier_dropout of 0.1 belongs to another head
        ("opt", {}),  # learned positions
        ("phi3", {"num_key_value_heads": 2}),  # one layer for queries, keys and values
        ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),  # heads wider than hidden_size / heads
        ("granite", {"num_key_value_heads": 2, "attention_multiplier": 0.3}),  # its own scale of scores
        ("starcoder2", {"num_key_value_heads": 2, "sliding_window": None, "use_bias": True}),
    ],
)
def test_log_probs_of_learner_and_engine_are_the_models_own(tmp_path, family, changes):
    loaded = load_model(ModelConfig(path=saved(family, tmp_path, **changes), dtype="float32"), "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    ours = Learner(config(), loaded).log_probs(RAGGED)
    requests = [request(row.prompt, seed=i) for i, row in enumerate(RAGGED)]
    sampled = generate(make_engine(loaded.model, loaded.eos_token_ids, max_context=CONTEXT), requests)
    for each, done in zip(requests, sampled, strict=True):
        np.testing.assert_allclose(done.logp, plain_logp(loaded.model, each, done.tokens), rtol=0, atol=1e-5)
    loaded.causal_lm.set_attn_implementation("eager")
    for row, logp in zip(RAGGED, ours, strict=True):
        expected = plain_log_probs(loaded.model, row, 1.0).detach().numpy()
        np.testing.assert_allclose(logp, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phi", "PhiForCausalLM, whose head has a bias"),
        ("bloom", "BloomForCausalLM, whose BloomModel has no list of decoder `layers`"),
        ("gptj", "GPTJForCausalLM, whose GPTJModel has no list of decoder `layers`"),
        ("gpt2", "GPT2LMHeadModel, whose GPT2Model has no list of decoder `layers`"),
        ("stablelm", "StableLmForCausalLM, whose attention does not go through transformers' AttentionInterface"),
        ("cohere", "has logit_scale = 0.0625 in its config"),
        ("gemma2", "has final_logit_softcapping = 30.0 in its config"),
        ("llama4_text", "has num_local_experts = 16 in its config"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path, family, message):
    with pytest.raises(ConfigError, match=f"^model.path: .*{message}") as error:
        load_model(ModelConfig(path=saved(family, tmp_path)), "cpu")  # in bfloat16
    assert "\n" not in str(error.value)
    model = random_model(family)
    model.config._attn_implementation = ATTENTION
    with pytest.raises(ValueError, match=message):
        make_engine(model)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("nemotron", "NemotronForCausalLM, whose forward does not run on packed tokens .*ValueError"),
        ("diffllama", "DiffLlamaForCausalLM, not each of whose 2 layers attends once"),
    ],
)
def test_what_only_a_forward_shows_is_refused_by_name(tmp_path, family, message):
    path = saved(family, tmp_path, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=f"^model.path: .*{message}") as error:
        load_model(ModelConfig(path=path, dtype="float32"), "cpu")
    assert "\n" not in str(error.value)


def test_only_dropout_of_a_causal_language_model_is_refused():
    check_config(CONFIG_MAPPING["gpt2"](**OF_FAMILY["gpt2"]))  # has summary_first_dropout = 0.1
    check_config(CONFIG_MAPPING["gpt_neox"]())  # has classifier_dropout = 0.1
    with pytest.raises(UnsupportedModel, match="attn_pdrop = 0.1"):
        check_config(CONFIG_MAPPING["gpt2"](**OF_FAMILY["gpt2"] | {"attn_pdrop": 0.1}))
