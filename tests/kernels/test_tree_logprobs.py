"""tree_logprobs against transformers' own forward of each trace alone."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from spiral_kernels import LogProbs, tree_logprobs
from tests.learner.tiny import FAMILIES, base_model

PROMPT = list(range(3, 40))
GROUP = [  # one prompt, samples of one token, identical ones, one that is a prefix of another
    [PROMPT, sample]
    for sample in ([5, 7, 9, 11], [5, 7, 9, 2, 3, 4, 4], [8], [5, 7, 9, 11], [5, 7], list(range(30)), list(range(25)))
]
MIXED = [*GROUP, [[9, 9], [1, 2], [4, 4, 4], [3, 3]], [[2], [4]], [PROMPT[:20], [7, 8]]]  # a tool's output, others


def trained(family: str, dtype: torch.dtype = torch.float64, **changes):
    """All weights trained, transformers' default attention."""
    model = base_model(family, dtype, **changes).requires_grad_(True)
    model.set_attn_implementation("sdpa")
    return model.eval()


def one_by_one(model, segments, temperature=1.0) -> LogProbs:
    """temperature: a number, or (R,)."""
    logp, entropy, lse = [], [], []
    n_tokens = [sum(len(segment) for segment in trace[1::2]) for trace in segments]
    each = torch.as_tensor(temperature, dtype=torch.float64).expand(sum(n_tokens)).split(n_tokens)
    for trace, temperatures in zip(segments, each, strict=True):
        ids = [token for segment in trace for token in segment]
        sampled = [i % 2 == 1 for i, segment in enumerate(trace) for _ in segment]
        rows = torch.tensor(sampled).nonzero()[:, 0]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, rows - 1].double()
        logits = logits / temperatures[:, None]
        all_logp = logits.log_softmax(-1)
        logp.append(all_logp.gather(1, torch.tensor(ids)[rows, None])[:, 0])
        entropy.append(-(all_logp.exp() * all_logp).sum(-1))
        lse.append(logits.logsumexp(-1))
    return LogProbs(torch.cat(logp), torch.cat(entropy), torch.cat(lse))


def gradients(model, logp: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss that weighs every token differently."""
    model.zero_grad()
    (logp * torch.linspace(-1, 2, len(logp), dtype=logp.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys() and a
    largest = max(g.abs().max() for g in b.values())
    assert max((a[name] - b[name]).abs().max() for name in a) <= tolerance * largest


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family, checkpointing):
    model = trained(family)
    truth = one_by_one(model, MIXED, 0.7)
    expected = gradients(model, truth.logp)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    found = tree_logprobs(model, MIXED, temperature=0.7, return_entropy=True)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b.detach() if b.requires_grad else b, rtol=0, atol=1e-12, check_dtype=False)
    assert_same(gradients(model, found.logp), expected, 1e-10)


def test_through_peft_with_a_frozen_base():
    base = trained("qwen3").requires_grad_(False)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"), autocast_adapter_dtype=False).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = gradients(model, one_by_one(model, GROUP).logp)
    assert_same(gradients(model, tree_logprobs(model, GROUP).logp), expected, 1e-10)


def test_only_live_tokens_are_computed():
    model = trained("llama")
    truth = one_by_one(model, GROUP)
    live = torch.zeros(len(truth.logp), dtype=torch.bool)
    live[4:6] = True  # of the second sample, whose tree is the prompt and two tokens
    rows = []
    hook = model.get_decoder().norm.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    found = tree_logprobs(model, GROUP, live=live)
    hook.remove()
    assert rows == [len(PROMPT) + 1]
    torch.testing.assert_close(found.logp, torch.where(live, truth.logp, 0.0))
    expected = gradients(model, torch.where(live, one_by_one(model, GROUP).logp, 0.0))
    assert_same(gradients(model, found.logp), expected, 1e-10)
    assert not tree_logprobs(model, GROUP, live=live & False).logp.any()


def test_a_temperature_per_token_and_a_head_with_a_frozen_bias():
    model = trained("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(50, dtype=torch.float64), requires_grad=False)
    n_tokens = sum(len(sample) for _, sample in GROUP)
    temperature, live = torch.linspace(0.5, 2, n_tokens), torch.arange(n_tokens) % 3 == 1
    truth = one_by_one(model, GROUP, temperature)
    found = tree_logprobs(model, GROUP, live=live, temperature=temperature)
    torch.testing.assert_close(found.logp[live].double(), truth.logp[live], rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_calls_of_the_model_stay_as_they_were(tmp_path, attention):
    model = trained("qwen2", torch.float32)
    model.set_attn_implementation(attention)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 1, 9, 8, 7, 3]])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        of_tree = tree_logprobs(model, GROUP).logp
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
        assert torch.equal(tree_logprobs(model, GROUP).logp, of_tree)
        again = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config._attn_implementation == "sdpa"
    if attention == "sdpa":
        assert torch.equal(loaded.generate(ids[:1], max_new_tokens=3, do_sample=False), again)


def gemma2(**changes) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    settings = dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"] * 2,
        attn_logit_softcapping=None,
        final_logit_softcapping=2.0,
        initializer_range=0.5,
    )
    return Gemma2ForCausalLM(Gemma2Config(**settings | changes)).eval()


def test_the_heads_soft_cap():
    model = gemma2()
    truth = one_by_one(model, GROUP)
    expected = gradients(model, truth.logp)
    found = tree_logprobs(model, GROUP)
    torch.testing.assert_close(found.logp.double(), truth.logp, rtol=0, atol=1e-5)
    assert_same(gradients(model, found.logp), expected, 1e-5)


def window():
    config = MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        sliding_window=8,
    )
    return MistralForCausalLM(config).eval()


def dropout():
    model = trained("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    return model.train()


def one_layer_of_its_own():
    model = trained("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, spiral_tree, **kwargs: forward(*args, **kwargs | {"attention_mask": None})
    return model


def head():
    model = trained("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (window, "layer 0 has sliding_window = 8; only full causal attention"),
        (lambda: gemma2(layer_types=["full_attention", "sliding_attention"]), "has sliding_attention in layer 1"),
        (lambda: gemma2(attn_logit_softcapping=5.0), "has attn_logit_softcapping = 5.0"),
        (dropout, r"has dropout 0.1 in model.layers.1.mlp.act_fn.1: model.eval\(\)"),
        (one_layer_of_its_own, r"only layers \[1\] attended over the tree"),
        (lambda: torch.nn.Linear(2, 2), "Linear is no causal language model"),
        (head, "has a Sequential for a head"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(make, words):
    with pytest.raises(ValueError, match=f"tree_logprobs: .*{words}"):
        tree_logprobs(make(), GROUP)


def test_a_first_token_that_nothing_predicts():
    with pytest.raises(ValueError, match="the first token of trace 1 is sampled"):
        tree_logprobs(trained("llama"), [GROUP[0], [[], [3]]])
