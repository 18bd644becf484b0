"""The learner's step on real rollouts: every token once, beside other ways to the same gradient.

`spiral-fast bench learner`, or `python -m bench.learner.run [--case NAME] [--threads N] [--rounds N]`.

All contenders make the same update of the same rows; `tokens` and `TFLOP` are what each computes (matrix products of
forward and backward, spiral_fast/learner/cost.py; padding included), logical tokens/s divides the tokens of the rows
each alone by the seconds. `speed-up` is over `flat`; `of ratio` is that over (flat's FLOPs / own FLOPs): 1 = every FLOP
saved is time saved. `of rate` is FLOPs / seconds over the rate of one GEMM of the model (1024 x d)(d x d_ff) in the
same process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from bench.learner.padded import PaddedLearner
from bench.learner.prefix_grouper import ConcatAttention
from bench.learner.rollouts import Rollouts, sample
from spiral_fast.config import Config, load_config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.rows import Row
from spiral_fast.set_up import SetUp, set_up


class Case(NamedTuple):
    config: str
    dtype: str
    n_problems: int
    micro_batch_tokens: int


CASES = {
    "demo": Case("configs/demo.yaml", "float32", 16, 4096),
    "smollm2-float32": Case("configs/smollm2_cpu.yaml", "float32", 8, 2048),
    "smollm2-bfloat16": Case("configs/smollm2_cpu.yaml", "bfloat16", 8, 2048),
}
ALL_LIVE = ("flat", "set", "tree", "PrefixGrouper", "padded, sorted", "padded, batch order (TRL)")
PRUNED = ("flat, dead rows left out", "tree, dead rows left out")


class Line(NamedTuple):
    case: str
    name: str
    tokens: int  # computed
    flop: float
    seconds: float  # median
    logical_tokens_per_s: float
    speed_up: float  # over flat on the same rows
    of_ratio: float  # over the ratio of FLOPs
    of_rate: float  # of the GEMM rate
    gradient_norm: float


class Step(NamedTuple):
    gradient_norm: float
    tokens: int  # computed
    flop: float


Contender = Callable[[list[Row]], Step]  # one step of learning rate 1e-12


class PrefixGrouperLearner(Learner):
    """learner.sharing set, with ConcatAttention."""

    def _micro_batches(self, rows, load=None):
        for part, packed in super()._micro_batches(rows, load):
            packed.attend = ConcatAttention([rows[i] for i in part])
            yield part, packed


def load(case: Case) -> tuple[Config, SetUp]:
    small = [
        "problems.train_size=64",
        "problems.eval_size=2",
        f"model.dtype={case.dtype}",
        "learner.learning_rate=1e-12",
    ]
    config = load_config(case.config, [*small, "learner.warmup_steps=0", "learner.self_check=false"])
    torch.manual_seed(0)
    parts = set_up(config)
    with torch.no_grad():
        for name, parameter in parts.loaded.model.named_parameters():
            if "lora_B" in name:  # a fresh adapter is zero
                parameter.normal_(std=1e-3)
    return config, parts


def contenders(case: Case) -> tuple[dict[str, Contender], SetUp, Rollouts]:
    config, parts = load(case)
    rollouts = sample(config, parts, case.n_problems)
    found: dict[str, Contender] = {}

    def ours(sharing: str, kind: type[Learner] = Learner) -> Contender:
        changes = {"sharing": sharing, "micro_batch_tokens": case.micro_batch_tokens}
        learner = kind(config.model_copy(update={"learner": config.learner.model_copy(update=changes)}), parts.loaded)

        def step(rows: list[Row]) -> Step:
            stats = learner.step(rows)
            return Step(stats.gradient_norm, stats.tokens_computed, stats.flops_computed)

        return step

    found["flat"] = found[PRUNED[0]] = ours("none")
    found["set"] = ours("set")
    found["tree"] = found[PRUNED[1]] = ours("tree")
    found["PrefixGrouper"] = ours("set", PrefixGrouperLearner)
    _, other = load(case)
    other.loaded.model.load_state_dict(parts.loaded.model.state_dict())
    other.loaded.causal_lm.set_attn_implementation("sdpa")
    for module in other.loaded.model.modules():
        if isinstance(module, LoraLayer):
            del module.forward  # back to peft's own
    for name, sort in (("padded, sorted", True), ("padded, batch order (TRL)", False)):
        padded = PaddedLearner(other.loaded.model, 0, case.micro_batch_tokens, sort=sort)
        found[name] = lambda rows, padded=padded: Step(padded.step(rows), *padded.computed(rows))
    return found, parts, rollouts


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


def run(cases: list[str] | None = None, threads: int = 1, rounds: int = 3) -> list[Line]:
    """Measure, print and return the table. Medians of `rounds`, contenders taking turns.

    One thread: CPU seconds, so that other load counts little; else wall."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(f"learner step: {threads} thread(s), {'CPU' if threads == 1 else 'wall'} seconds, medians of {rounds}")
    table = []
    for name in cases or CASES:
        table += _measure(name, rounds, clock)
    torch.set_num_threads(before)
    return table


def _measure(name: str, rounds: int, clock: Callable[[], float]) -> list[Line]:
    found, parts, rollouts = contenders(CASES[name])
    rows_of = {contender: rollouts.rows if contender in PRUNED else rollouts.all_live for contender in found}
    print(f"\n{name}: {rollouts.lengths}")
    for contender, step in found.items():
        step(rows_of[contender][:24])  # the warm-up
    times: dict[str, list[float]] = {contender: [] for contender in found}
    steps = {}
    for _ in range(rounds):
        for contender, step in found.items():
            start = clock()
            steps[contender] = step(rows_of[contender])
            times[contender].append(clock() - start)
    rate = gemm_rate(parts.loaded.model, clock)
    header = f"{'tokens':>8}{'TFLOP':>8}{'seconds':>9}{'logical/s':>11}{'speed-up':>10}{'of ratio':>10}{'of rate':>9}"
    print(f"{'':28}{header}{'|gradient|':>12}   GEMM {rate / 1e9:.0f} GFLOP/s")
    lines = []
    for contender in found:
        rows = rows_of[contender]
        flat = PRUNED[0] if contender in PRUNED else "flat"
        (norm, tokens, flop), flop_of_flat = steps[contender], steps[flat].flop
        seconds, speed_up = median(times[contender]), median(times[flat]) / median(times[contender])
        logical = sum(row.computed_tokens for row in rows) / seconds
        of_ratio, of_rate = speed_up / (flop_of_flat / flop), flop / rate / seconds
        line = Line(
            name,
            contender,
            tokens,
            flop,
            seconds,
            logical,
            speed_up,
            of_ratio,
            of_rate,
            norm,
        )
        lines.append(line)
        print(
            f"{contender:28}{tokens:8}{flop / 1e12:8.3f}{seconds:9.3f}{logical:11.0f}{speed_up:10.2f}{of_ratio:10.2f}"
            f"{of_rate:9.2f}{line.gradient_norm:12.5g}"
        )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    run(arguments.case, arguments.threads, arguments.rounds)
