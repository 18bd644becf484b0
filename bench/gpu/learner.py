"""A step of the learner at Qwen3-4B's shape, random weights, LoRA 32, on trees of 16k and 65k tokens; JSON lines.

`python -m bench.gpu.learner FILE [--seconds 90]`. Each tree is a problem's aggregation prompts (one, or four) with four
traces below each. Beside ours: what `spiral-fast plan` says of that step, prime-rl's published figures of a single
H100, and the same step by transformers and peft alone, every trace by itself, in the same process. A line that would
not be done in time is left out and named. Peak memory is that of the whole process, weights included.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.config import Config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.liger import use_liger
from spiral_fast.learner.model import LoadedModel, with_adapter
from spiral_fast.learner.policy import Policy
from spiral_fast.learner.rows import Row
from spiral_fast.plan.here import MFU, peak_flops
from spiral_fast.plan.learner_work import work_of
from spiral_fast.plan.memory import Micro, peak
from spiral_fast.plan.shape import shape_of
from spiral_fast.record.step_metrics import speed_metrics
from spiral_fast.trace import AGGREGATION

QWEN3_4B = Path(__file__).resolve().parents[2] / "tests/plan/qwen3_4b"
SIZES = (16384, 65536)
# Published by prime-rl for sequences of that length on one H100, LoRA on Qwen3-4B; not measured here.
PRIME_RL = {
    16384: {"tokens_per_s": 6230, "mfu": 0.217, "peak_gib": 23.3},
    65536: {"tokens_per_s": 4160, "peak_gib": 42.0},
}


@dataclass(frozen=True)
class Setting:
    model: Path  # folder with a config.json
    device: str
    sizes: tuple[int, ...]
    prompt: int = 256
    rank: int = 32

    def config(self) -> Config:
        return Config.model_validate(
            {
                "run_dir": "-",
                "model": {"path": "-", "lora": {"rank": self.rank, "alpha": self.rank}},
                "problems": {"source": "parts"},
                "learner": {"micro_batch_tokens": max(self.sizes) + 1, "checkpointing": True, "self_check": False},
            }
        )


def rows_of(tokens: int, prompt: int, vocabulary: int) -> list[Row]:
    """A problem's aggregation traces, four below each prompt that quotes four as long; their tree has `tokens`."""
    rng = np.random.default_rng(0)
    n_prompts = max(1, round(tokens / 16384))
    length = (tokens - prompt) // (8 * n_prompts)

    def some(n: int) -> list[int]:
        return rng.integers(0, vocabulary, n).tolist()

    problem, rows = some(prompt), []
    for _ in range(n_prompts):
        quoting = problem + some(4 * length)
        for _ in range(4):
            logp = np.full(length, -np.log(vocabulary), np.float32)
            rows.append(Row(quoting, some(length), logp, float(rng.standard_normal()), 1 / 256, AGGREGATION))
    return rows


def random_model(setting: Setting) -> LoadedModel:
    """The same weights each time; adapter and base away from zero."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(setting.model)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = with_adapter(model.requires_grad_(False), setting.config().model).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
    return LoadedModel(model, None, frozenset([0]), config.max_position_embeddings)


def ours(setting: Setting, loaded: LoadedModel) -> Callable[[list[Row]], torch.Tensor]:
    use_liger(loaded.causal_lm, "auto", setting.device)
    loaded.causal_lm.set_attn_implementation(ATTENTION)
    learner = Learner(setting.config(), loaded)

    def step(rows: list[Row]) -> torch.Tensor:
        stats = learner.accumulate(rows)
        gradient = learner.gradient()
        learner.update(stats)
        step.stats = stats
        return gradient

    return step


def transformers_and_peft(loaded: LoadedModel) -> Callable[[list[Row]], torch.Tensor]:
    """A forward for each trace: sdpa attention, peft's layers, checkpointing, all logits of its sampled tokens."""
    for module in loaded.model.modules():
        if isinstance(module, LoraLayer):
            del module.forward  # ours
    loaded.causal_lm.set_attn_implementation("sdpa")
    Policy(loaded.model).checkpoint_layers()
    parameters = [p for p in loaded.model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=2e-5)
    device = parameters[0].device

    def step(rows: list[Row]) -> torch.Tensor:
        optimiser.zero_grad()
        for row in rows:
            n = len(row.tokens)
            ids = torch.tensor([row.prompt + row.tokens], device=device)
            logits = loaded.model(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits[0, :-1]
            logp = logits.float().log_softmax(-1).gather(1, ids[0, -n:, None])[:, 0]
            ratio = (logp - torch.from_numpy(row.rollout_logp).to(device)).exp()
            (-row.weight * row.credit * ratio.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        optimiser.step()
        return gradient

    return step


def measure(step: Callable[[list[Row]], torch.Tensor], rows: list[Row], device: str) -> dict:
    """Of the second call: seconds, the process's peak memory; and the first call's gradient."""
    cuda = device == "cuda"
    gradient = step(rows).cpu()  # compiles
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step(rows)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"seconds": seconds, "peak_gib": memory, "gradient": gradient}


def planned(setting: Setting, loaded: LoadedModel, rows: list[Row]) -> dict:
    """As `spiral-fast plan` counts: peak memory, and seconds at its usual share of the peak FLOP/s."""
    work = work_of(rows, "tree", max(setting.sizes) + 1, shape_of(loaded.model).cost)
    micro = Micro(*work.largest, checkpointing=True, record_rows=round(work.rows), both_levels=False)
    flops = peak_flops(setting.config(), torch.device(setting.device))
    seconds = None if flops is None else (work.flops + work.recomputed) / (MFU * flops)
    return {"peak_gib": peak(shape_of(loaded.model), micro).total / 2**30, f"seconds_at_{MFU:g}": seconds}


def figures(setting: Setting, seconds: float, write: Callable[[dict], None]) -> None:
    """A line for each size and contender. Ours first, then the others in a model of their own."""
    begin, kept = time.monotonic(), {}

    def in_time(line: dict, expected: float) -> bool:
        left = seconds - (time.monotonic() - begin)
        if expected > left:
            write(line | {"left_out": f"{expected:.0f} s expected, {left:.0f} s left"})
        return expected <= left

    def attempt(line: dict, rows: list[Row]) -> dict | None:
        try:
            return measure(step, rows, setting.device)
        except Exception as error:  # out of memory, a kernel that does not run: the other lines are still worth having
            write(line | {"error": str(error)[-500:]})
            return None

    config = setting.config()
    loaded = random_model(setting)
    vocabulary, device = loaded.causal_lm.config.vocab_size, torch.device(setting.device)
    step = ours(setting, loaded)
    for size in setting.sizes:
        rows = rows_of(size, setting.prompt, vocabulary)
        line = {"bench": "learner step", "name": f"ours, {size} tokens"}
        smaller = [kept[s]["seconds"] * 2 * (size / s) ** 2 for s in kept]
        if not in_time(line, min(smaller, default=0)):
            continue
        if (found := attempt(line, rows)) is None:
            continue
        kept[size] = found
        speed = speed_metrics(step.stats, found["seconds"], peak_flops(config, device))
        write(
            line
            | {"seconds": found["seconds"], "peak_gib": found["peak_gib"], "tokens": step.stats.tokens_computed}
            | {name.removeprefix("time/learner_"): value for name, value in speed.items()}
            | {"planned": planned(setting, loaded, rows), "prime_rl_on_h100": PRIME_RL.get(size)}
        )
    del loaded, step
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    step = transformers_and_peft(random_model(setting))
    for size in setting.sizes:
        rows = rows_of(size, setting.prompt, vocabulary)
        line = {"bench": "learner step", "name": f"peer: transformers and peft, {size} tokens"}
        if size not in kept or not in_time(line, 6 * kept[size]["seconds"]):
            continue
        if (found := attempt(line, rows)) is None:
            continue
        true, mine = found["gradient"].double(), kept[size]["gradient"].double()
        write(
            line
            | {"seconds": found["seconds"], "peak_gib": found["peak_gib"]}
            | {"tokens_per_s_logical": sum(len(row.prompt) + len(row.tokens) for row in rows) / found["seconds"]}
            | {"ours_is_faster_by": found["seconds"] / kept[size]["seconds"]}
            | {"gradients_differ_by": ((mine - true).norm() / true.norm()).item()}  # bfloat16 rounds differently
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    arguments = parser.parse_args()

    def write(line: dict) -> None:
        with arguments.file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    figures(Setting(QWEN3_4B, "cuda", SIZES), arguments.seconds, write)


if __name__ == "__main__":
    main()
