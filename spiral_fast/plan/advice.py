"""What a plan takes for granted, what is worth knowing of it, and what to change where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spiral_fast.config import Config
from spiral_fast.plan.gpus import RESERVE, Gpu
from spiral_fast.plan.memory import Moment, largest_tree, peak
from spiral_fast.plan.rollout_work import STEP_SECONDS
from spiral_fast.plan.shape import Shape
from spiral_fast.plan.simulated import Liveness, Workload

if TYPE_CHECKING:
    from spiral_fast.plan.plan import Machines, Plan

NETWORK = 1e9  # bytes/s from the learner to a server
BUS = 25e9  # bytes/s between host and device, pinned memory, PCIe 4 or better


def assumptions(config: Config, workload: Workload, machines: Machines, engine: str, n: int) -> list[str]:
    gpu, rate = machines.gpu, workload.solve_rate
    lines = [
        f"{machines.name}: {gpu.memory / 1e9:.0f} GB of which {RESERVE:.0%} is left alone, "
        f"{gpu.flops / 1e12:.0f} TFLOP/s dense bfloat16, {gpu.bandwidth / 1e9:,.0f} GB/s ({gpu.source})",
        f"reached: {machines.mfu:.0%} of the FLOP/s in learner and prefill (what checkpointing computes again "
        f"included), {machines.bandwidth:.0%} of the bandwidth in decode, {1e3 * STEP_SECONDS:g} ms a decode pass "
        "beside that",
        f"lengths: {workload.lengths.text}, cut at L_max; search prompts of {workload.prompt_tokens} tokens",
        "rewards: a trace is right with a chance "
        + ("of its problem's own, uniform in 0..1" if rate is None else f"of {rate:g}"),
        f"tokens and FLOPs from {n} live problems of noise through the trainer's two stages, credits, cut and prefix "
        f"trees, scaled to {config.batch.live_problems}",
        "rollout and learning take turns; keys and values of a shared prompt are read once a pass for all who share it",
    ]
    if config.rollout.engine == "auto":
        lines.append("rollout.engine auto: SGLang is installed")
    if engine == "sglang":
        lines.append(f"adapter to each server in turn, float32 as base64, at {NETWORK / 1e9:g} GB/s")
    else:
        lines.append("the embedded engine on CUDA was never timed: its rollout takes longer than this bound")
    if machines.learner_gpus > 1 or (machines.gpus > 1 and engine == "radix"):
        lines.append("ranks of the learner: micro-batches split evenly, no time for communication")
    if config.learner.offload_checkpoints or config.learner.offload_base:
        lines.append(f"what is offloaded crosses the bus at {BUS / 1e9:g} GB/s, nothing of it beside the computation")
    return lines


def notes(config: Config, drawn: int, seen: Liveness, shares_gpu: bool, rollout_memory: Moment, gpu: Gpu) -> list[str]:
    found, wanted = [], config.batch.live_problems
    needed = wanted / seen.share
    if drawn < needed:
        found.append(
            f"batch.max_rounds ends the drawing at {drawn:,} problems, about {drawn * seen.share:,.0f} of them live: "
            f"the figures are of {wanted} live ones"
        )
    if drawn > 1.2 * needed:
        found.append(
            f"rounds of {config.batch.round_problems or wanted} draw {drawn:,} problems, where about {needed:,.0f} "
            f"give {wanted} live ones: smaller batch.round_problems sample less"
        )
    if shares_gpu and config.rollout.sglang.memory_fraction is None:
        parts = rollout_memory.parts
        fraction = (parts["SGLang: weights"] + parts["KV cache"]) / gpu.memory
        found.append(
            f"SGLang on the learner's GPU must be told its share, or it takes nearly all: "
            f"rollout.sglang.memory_fraction={int(100 * fraction) / 100:.2f}"
        )
    return found


def problems(plan: Plan, config: Config, shape: Shape, machines: Machines) -> list[str]:
    """Each with what to change, which was computed to be enough where a number is given."""
    found, gpu = [], machines.gpu
    if plan.longest > shape.max_context:
        found.append(
            f"the longest sequence ({plan.longest:,} tokens) exceeds the model's context of {shape.max_context:,}: "
            "lower rollout.search_max_new_tokens or rollout.set_size"
        )
    if plan.learner_peak.total > gpu.usable:
        found.append(_learner_problem(plan, config, shape, machines))
    over = plan.rollout_memory.total - gpu.usable
    if over > 0 and plan.engine == "radix":
        room = max(0, int(config.rollout.cache_tokens - over / (2 * shape.kv_bytes)))
        found.append(
            f"rollout needs {over / 1e9:.1f} GB more than there is: rollout.cache_tokens={room}"
            + ("" if room >= plan.longest else f" is below the longest sequence ({plan.longest:,}): a larger GPU")
        )
    elif over > 0 and config.rollout.sglang.memory_fraction is not None:
        fraction = int(100 * max(0.0, config.rollout.sglang.memory_fraction - over / gpu.memory)) / 100
        found.append(
            f"rollout needs {over / 1e9:.1f} GB more than there is: rollout.sglang.memory_fraction={fraction:.2f}"
        )
    if plan.kv_tokens < plan.longest:
        found.append(
            f"the KV cache has room for {plan.kv_tokens:,} tokens, the longest sequence has {plan.longest:,}: a larger "
            "GPU, rollout.sglang.tensor_parallel, or servers on GPUs of their own (--gpus)"
        )
    return found


def _learner_problem(plan: Plan, config: Config, shape: Shape, machines: Machines) -> str:
    """What makes the learner fit, the cheapest change first."""
    gpu, micro = machines.gpu, plan.micro
    other = plan.learner_peak.total - peak(shape, micro).total  # a server on the same GPU
    text = f"learning needs {(plan.learner_peak.total - gpu.usable) / 1e9:.1f} GB more than there is: "

    def most(changes: dict[str, bool]) -> int:
        fields = {"sharded" if name == "fsdp" else name: value for name, value in changes.items()}
        return largest_tree(shape, gpu.usable - other, replace(micro, **fields))

    checkpointing = {"checkpointing": True}
    offloaded = checkpointing | {"offload_checkpoints": True}
    streamed = offloaded | {"fsdp": True, "offload_base": True}
    if not config.learner.checkpointing and most(checkpointing) >= micro.tokens:
        return text + "learner.checkpointing=true"
    for changes in ({}, checkpointing, offloaded, streamed):
        if (tokens := most(changes)) >= plan.longest:
            new = {name: "true" for name, value in changes.items() if getattr(config.learner, name) != value}
            if tokens < micro.tokens:
                new["micro_batch_tokens"] = str(tokens)
            return text + " ".join(f"learner.{name}={value}" for name, value in new.items())
    alone = largest_tree(shape, gpu.usable, replace(micro, checkpointing=True))
    if other and alone >= plan.longest:
        return text + "servers on GPUs of their own (--gpus 2) and learner.checkpointing=true"
    return text + (
        f"a larger GPU, or shorter sequences: {most(streamed):,} tokens fit with all that learner.checkpointing and "
        f"the offloads save, the longest sequence has {plan.longest:,}"
    )
