"""Learner and engine with Liger's kernels against the same model without: for the interpreter and for CUDA."""

from __future__ import annotations

import copy

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ModelConfig
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.liger import replace
from spiral_fast.learner.model import LoadedModel, with_adapter
from spiral_fast.rollout.engine import generate
from tests.learner.tiny import CONTEXT, VOCABULARY, adapter, config, make_rows
from tests.rollout.tiny_models import make_engine, request

ROWS = make_rows([(4, 3), (4, 2)])


def random_loaded(family: str, dtype: torch.dtype, device: str, **changes) -> LoadedModel:
    """A small model of this family, norms away from 1, an adapter away from 0."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        sliding_window=None,
    )
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings | changes), dtype=dtype).eval()
    for parameter in model.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    peft_model = with_adapter(model, ModelConfig(path="-", lora={"rank": 4, "alpha": 6})).to(device)
    for _, parameter in adapter(peft_model):
        torch.nn.init.normal_(parameter.data, std=0.1)
    model.set_attn_implementation(ATTENTION)
    return LoadedModel(peft_model, None, frozenset([1]), CONTEXT)


def with_and_without(family: str, dtype: torch.dtype, device: str, **changes) -> list[LoadedModel]:
    """Liger's kernels are in the first alone."""
    fused = random_loaded(family, dtype, device, **changes)
    plain = random_loaded(family, dtype, device, **changes)
    replace(fused.causal_lm)
    return [fused, plain]


def of_learner(loaded: LoadedModel, rows=ROWS, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all sampled tokens, and the gradient of the adapter, in one vector each."""
    learner = Learner(config(self_check=False, **settings), loaded)
    logp = torch.cat([torch.from_numpy(x) for x in learner.log_probs(rows)])
    assert learner.accumulate(rows).skipped_reason is None
    return logp, learner.gradient().cpu()


def of_engine(loaded: LoadedModel) -> list:
    requests = [request(row.prompt, seed=i, max_new_tokens=3) for i, row in enumerate(ROWS)]
    engine = make_engine(loaded.model, loaded.eos_token_ids, max_context=CONTEXT)
    return [copy.deepcopy(done) for done in generate(engine, requests)]


def check(family: str, dtype: torch.dtype, device: str, tolerance: float, **changes) -> None:
    """Values and gradients of the learner, with and without checkpointing; what the engine samples."""
    for checkpointing, sharing in ((False, "tree"), (True, "none")):
        fused, plain = with_and_without(family, dtype, device, **changes)
        found, true = (of_learner(one, checkpointing=checkpointing, sharing=sharing) for one in (fused, plain))
        for name, mine, exact in zip(("log-probs", "gradient"), found, true, strict=True):
            difference = (mine - exact).abs().max() / exact.abs().max()
            assert difference < tolerance, (name, checkpointing, sharing, difference)
        assert exact.norm() > 0.01
    for mine, exact in zip(of_engine(fused), of_engine(plain), strict=True):
        assert mine.tokens == exact.tokens or dtype != torch.float32
        if mine.tokens == exact.tokens:
            torch.testing.assert_close(torch.as_tensor(mine.logp), torch.as_tensor(exact.logp), rtol=0, atol=tolerance)
