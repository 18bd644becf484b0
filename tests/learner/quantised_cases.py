"""A small model whose base bitsandbytes holds in 8 or 4 bits, against the weights that it stands for."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ModelConfig
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import LoadedModel, _read, with_adapter
from spiral_fast.learner.probe import check_packed
from spiral_fast.learner.quantise import is_quantised, weight_of
from spiral_fast.rollout.engine import generate
from tests.learner.tiny import CONTEXT, VOCABULARY, adapter, config, make_rows
from tests.rollout.tiny_models import make_engine, plain_logp, request

ROWS = make_rows([(5, 7), (5, 3), (9, 4)])


def saved(folder) -> str:
    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(settings).save_pretrained(folder)
    return str(folder)


def load(folder: str, quantisation: str, device: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """As load_model does, which refuses the CPU; the adapter away from zero."""
    base = _read(folder, AutoConfig.from_pretrained(folder), dtype, device, quantisation).requires_grad_(False)
    model = with_adapter(base, ModelConfig(path="-", lora={"rank": 4, "alpha": 6})).to(device).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in adapter(model):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    if (
        device == "cpu"
    ):  # there, in eval mode, a forward without gradients changes the weights into a form that has none
        for layer in filter(is_quantised, model.modules()):
            layer.train()
    check_packed(model)
    return LoadedModel(model, None, frozenset([1]), CONTEXT)


def dequantised(quantised: LoadedModel, folder: str, device: str) -> LoadedModel:
    """A plain model with the weights that the quantised one stands for."""
    plain = load(folder, "none", device)
    theirs = dict(quantised.model.named_modules())
    n = 0
    with torch.no_grad():
        for name, module in plain.model.named_modules():
            if name.endswith("base_layer"):
                assert is_quantised(theirs[name]) and not is_quantised(module)
                module.weight.copy_(weight_of(theirs[name]))
                n += 1
    assert n == 14
    return plain


def of_learner(loaded: LoadedModel, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    learner = Learner(config(self_check=False, **settings), loaded)
    logp = torch.cat([torch.from_numpy(x) for x in learner.log_probs(ROWS)])
    assert learner.accumulate(ROWS).skipped_reason is None
    return logp, learner.gradient().cpu()


def check(quantisation: str, device: str, folder: str) -> None:
    quantised = load(folder, quantisation, device)
    plain = dequantised(quantised, folder, device)
    # int8 rounds activations to 8 bits too, nf4 nothing but the weights
    tolerance = {"int8": 0.1, "nf4": 1e-3}[quantisation]
    truth = of_learner(plain)
    for checkpointing, sharing in ((False, "tree"), (True, "none")):
        found = of_learner(quantised, checkpointing=checkpointing, sharing=sharing)
        for name, mine, true in zip(("log-probs", "gradient"), found, truth, strict=True):
            assert (mine - true).norm() / true.norm() < tolerance, (name, checkpointing, sharing)
    unquantised = of_learner(load(folder, "none", device))
    assert (unquantised[0] - truth[0]).norm() / truth[0].norm() > 1e-3  # it is another model
    requests = [request(row.prompt, seed=i) for i, row in enumerate(ROWS)]
    sampled = [
        copy.deepcopy(d) for d in generate(make_engine(quantised.model, frozenset([1]), max_context=CONTEXT), requests)
    ]
    for each, done in zip(requests, sampled, strict=True):
        np.testing.assert_allclose(done.logp, plain_logp(quantised.model, each, done.tokens), rtol=0, atol=5e-2)
    quantised.causal_lm.set_attn_implementation(ATTENTION)
    assert Learner(config(), quantised).cost == Learner(config(), plain).cost
