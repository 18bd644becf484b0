"""Small random models with a non-zero LoRA, and the plain forward the engine is compared with."""

from __future__ import annotations

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.rollout.engine import Request
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.trace import TraceKey

VOCABULARY = 60
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str = "qwen3", *, seed: int = 0, kv_heads: int = 2, dtype=torch.float32, **changes):
    """3 layers, d 32, 4 query heads; the peft model, on the engine's attention."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        initializer_range=0.15,
        **changes,
    )
    model = get_peft_model(model_class(config), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    fuse_lora(model)
    redraw_lora(model, seed)
    model.get_base_model().set_attn_implementation(ATTENTION)
    return model.to(dtype).eval()


def redraw_lora(model, seed: int) -> None:
    """Other adapter weights, in place, B not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)


def make_engine(model, eos=(1,), **changes) -> RadixEngine:
    settings = dict(max_context=512, max_running=64, prefill_chunk=64, cache_tokens=20000) | changes
    causal_lm = model.get_base_model() if isinstance(model, PeftModel) else model
    return RadixEngine(causal_lm, frozenset(eos), **settings)


def request(prompt, *, seed: int = 0, max_new_tokens: int = 12, temperature: float = 1.0, index: int = 0) -> Request:
    return Request(TraceKey("p", 0, -1, index), tuple(map(int, prompt)), max_new_tokens, temperature, seed)


@torch.no_grad()
def plain_logits(model, tokens) -> torch.Tensor:
    """(len(tokens), V) by transformers' own eager forward of the whole sequence."""
    base = model.get_base_model()
    base.set_attn_implementation("eager")
    logits = base(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    base.set_attn_implementation(ATTENTION)
    return logits


def plain_logp(model, request: Request, tokens) -> np.ndarray:
    """Log-probs of `tokens` after the prompt, at the request's temperature."""
    logits = plain_logits(model, [*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
    logp = (logits.double() / request.temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def tree_prompts(rng: np.random.Generator, problems: int = 4, sets: int = 3) -> list[list[int]]:
    """Prompts that share a template, a problem, and candidates: ragged, some a prefix of others, one of one token."""
    template = rng.integers(2, VOCABULARY, 7).tolist()
    prompts = [[template[0]], template]
    for _ in range(problems):
        problem = template + rng.integers(2, VOCABULARY, rng.integers(3, 20)).tolist()
        candidates = [rng.integers(2, VOCABULARY, rng.integers(1, 25)).tolist() for _ in range(4)]
        prompts.append(problem)
        for _ in range(sets):
            members = sorted(rng.choice(4, 3, replace=False))
            prompts.append(problem + [t for i in members for t in candidates[i]])
    return prompts


def tree_requests(seed: int = 0, siblings: int = 3, **settings):
    rng = np.random.default_rng(seed)
    return [
        request(prompt, seed=100 * p + i, max_new_tokens=int(rng.integers(1, 20)), index=i, **settings)
        for p, prompt in enumerate(tree_prompts(rng))
        for i in range(siblings)
    ]


def trie_tokens(prompts) -> int:
    """Brute force: the number of distinct non-empty prefixes."""
    return len({tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)})


def check_counts(engine, requests, completions, before=None):
    for each, done in zip(requests, completions, strict=True):
        assert done.prompt_tokens == len(each.prompt) == done.cached_tokens + done.computed_tokens
    now = engine.counts - before if before else engine.counts
    assert now.prompt == sum(done.prompt_tokens for done in completions)
    assert now.cached == sum(done.cached_tokens for done in completions)
    assert now.computed == sum(done.computed_tokens for done in completions)
    assert now.generated == sum(len(done.tokens) for done in completions)
