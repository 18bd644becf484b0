"""The learner on models with sliding windows: each row alone, against transformers' own masks; no trees."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from spiral_fast.attention import ATTENTION
from spiral_fast.batch_invariant import check_possible
from spiral_fast.config import Config, ConfigError, ModelConfig
from spiral_fast.learner.cost import cost_of
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.model import LoadedModel, load_model
from spiral_fast.learner.packed import DocumentAttention, pack
from tests.learner.tiny import (
    CONTEXT,
    VOCABULARY,
    WINDOW,
    WINDOWED,
    adapter,
    config,
    gradient_of_step,
    make_rows,
    plain_gradient,
    plain_log_probs,
    save_tokenizer,
)

ROWS = make_rows([(5, 7), (30, 7), (3, 1), (1, 40), (12, 9), (12, 9), (1, WINDOW), (2, WINDOW), (60, 33)])


def peft_model(family: str, attention: str, dtype: torch.dtype = torch.float64) -> PeftModel:
    """The same random numbers each time."""
    torch.manual_seed(0)
    config_class, model_class, changes = WINDOWED[family]
    settings = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
    settings |= dict(num_key_value_heads=2, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    base = model_class(config_class(**settings | changes)).to(dtype).requires_grad_(False)
    for name, parameter in base.named_parameters():
        parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.normal_(std=0.2)
    for module in list(base.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):  # transformers' own round to float32
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=1e-6, dtype=dtype).requires_grad_(False)
                exact.weight.data.copy_(norm.weight)
                setattr(module, name, exact)
    base.set_attn_implementation(attention)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"), autocast_adapter_dtype=False
    )
    with torch.no_grad():
        for _, parameter in adapter(model):
            parameter.normal_(std=0.1)
    return model.eval()


def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    model = peft_model(family, ATTENTION, dtype)
    fuse_lora(model)
    return LoadedModel(model, None, frozenset([1]), CONTEXT)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("budget", [40, 16384])
@pytest.mark.parametrize("family", WINDOWED)
def test_gradients_are_transformers_own(family, budget, checkpointing):
    settings = config(0.7, sharing="none", micro_batch_tokens=budget, checkpointing=checkpointing)
    found, stats = gradient_of_step(Learner(settings, loaded(family)), ROWS)
    assert (stats.micro_batches > 3) == (budget == 40)
    truth = plain_gradient(peft_model(family, "sdpa"), ROWS, 0.7)  # its masks are made by transformers
    for name, expected in truth.items():
        assert (found[name] - expected).norm() <= 1e-10 * expected.norm(), name


@pytest.mark.parametrize("family", WINDOWED)
def test_these_rows_are_longer_than_the_window(family):
    """With full attention they have other log-probs, from the first token on that does not see its first one."""
    row = ROWS[-1]
    windowed, full = peft_model(family, "sdpa"), peft_model(family, "sdpa")
    full.get_base_model().config.sliding_window = CONTEXT
    for layer in full.get_base_model().model.layers:
        layer.self_attn.sliding_window = CONTEXT
    gap = (plain_log_probs(windowed, row, 1.0) - plain_log_probs(full, row, 1.0)).abs()
    assert (gap > 1e-3).all()
    short = ROWS[-3]
    assert len(short.prompt) + len(short.tokens) - 1 == WINDOW
    assert torch.equal(plain_log_probs(windowed, short, 1.0), plain_log_probs(full, short, 1.0))


@pytest.mark.parametrize("window", [1, 2, 7, 128, 129, 500])
def test_attention_sees_the_window_inside_documents(window):
    lengths, generator = [1, 2, 7, 7, 128, 129], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(lengths), 6, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    out = DocumentAttention(lengths, "cpu").attend(0, q, k, v, 0.3, window)
    start = 0
    for length in lengths:
        for at in range(start, start + length):
            first = max(start, at - window + 1)
            for head in range(4):
                keys, values = (x[0, head // 2, first : at + 1] for x in (k, v))
                expected = (keys @ q[0, head, at] * 0.3).softmax(0) @ values
                assert torch.allclose(out[0, at, head], expected, atol=1e-12, rtol=0)
        start += length


@pytest.mark.parametrize("family", WINDOWED)
def test_flops_count_pairs_within_the_window(family):
    model = loaded(family).model
    cost, [row] = cost_of(model), make_rows([(20, 9)])
    seen = [
        min(at + 1, window)
        for at in range(28)
        for window in ([WINDOW, WINDOW] if family == "mistral" else [WINDOW, 28])
    ]
    assert cost.of_row(row) == pytest.approx(cost.flops(28, sum(seen) / 2, 9))
    assert cost.of_packed(pack([(row.prompt, row.tokens)])) == cost.of_row(row)


@pytest.mark.parametrize("family", WINDOWED)
def test_loading_a_saved_model(family, tmp_path):
    peft_model(family, "sdpa").unload().to(torch.float32).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), dtype="float32"), "cpu")
    layer = 1 if family == "qwen2" else 0
    words = f"layer {layer} attends within a sliding window of 8 tokens"
    for sharing in ("tree", "set"):
        with pytest.raises(
            ConfigError, match=f"^learner.sharing: '{sharing}' .* {words}, .*; set learner.sharing: none$"
        ):
            Learner(config(sharing=sharing), model)
    none = config(sharing="none")
    assert Learner(none, model).step(ROWS).gradient_norm > 0
    invariant = Config.model_validate(none.model_dump() | {"rollout": {"batch_invariant": True}})
    with pytest.raises(ConfigError, match=f"^rollout.batch_invariant: .*{words}"):
        Learner(invariant, model)
    with pytest.raises(ValueError, match=words):
        check_possible(model.causal_lm)


def test_a_window_that_the_config_does_not_tell_is_refused(tmp_path, monkeypatch):
    from transformers.models.mistral.modeling_mistral import MistralAttention

    peft_model("mistral", "sdpa").unload().to(torch.float32).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    forward = MistralAttention.forward

    def wider(self, *args, **kwargs):
        self.config.sliding_window = 100  # longer than the probe's tokens
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config.sliding_window = 200

    edited = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": 200}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    monkeypatch.setattr(MistralAttention, "forward", wider)
    with pytest.raises(ConfigError, match="whose layer 0 has a sliding window of 100; by its config it is 200"):
        load_model(ModelConfig(path=str(tmp_path), dtype="float32"), "cpu")
