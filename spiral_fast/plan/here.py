"""The plan of a run on the GPUs it has, by the accounting of `spiral-fast plan`: what to expect, and the peak MFU is a
share of."""

from __future__ import annotations

import torch

from spiral_fast import ranks
from spiral_fast.config import Config, ConfigError
from spiral_fast.learner.model import LoadedModel
from spiral_fast.plan.gpus import GPUS, gpu_of

MFU, BANDWIDTH = 0.4, 0.7  # as `spiral-fast plan` assumes
PROBLEMS = 4  # simulated token by token; enough for two digits


def peak_flops(config: Config, device: torch.device) -> float | None:
    """FLOP/s of the GPUs of all ranks; None on the CPU, on a GPU that plan/gpus.py does not know, and for a dtype other
    than bfloat16."""
    if device.type != "cuda" or config.model.dtype != "bfloat16":
        return None
    name = gpu_of(torch.cuda.get_device_name(device))
    return None if name is None else ranks.size() * GPUS[name].flops


def expectation(config: Config, loaded: LoadedModel) -> list[str]:
    """What to expect of the learner's memory and a step's seconds, in one line; none where `peak_flops` is None."""
    device = loaded.device
    if peak_flops(config, device) is None:
        return []
    return [plan_line(config, loaded, gpu_of(torch.cuda.get_device_name(device)), ranks.size())]


def plan_line(config: Config, loaded: LoadedModel, gpu: str, learner_gpus: int) -> str:
    from spiral_fast.plan.lengths import usual_lengths
    from spiral_fast.plan.plan import Machines, make_plan
    from spiral_fast.plan.shape import shape_of
    from spiral_fast.plan.simulated import Workload
    from spiral_fast.rollout.chosen import chosen_engine

    rollout = config.rollout.model_copy(update={"engine": chosen_engine(config.rollout, cuda=True)})
    config = config.model_copy(update={"rollout": rollout})
    servers = 0 if rollout.engine == "radix" else len(rollout.servers) or (learner_gpus > 1)
    gpus = learner_gpus + servers * rollout.sglang.tensor_parallel
    machines = Machines(GPUS[gpu], gpu, gpus, learner_gpus, MFU, BANDWIDTH)
    workload = Workload(usual_lengths(rollout), min(256, rollout.max_prompt_tokens), None)
    try:
        plan = make_plan(config, shape_of(loaded.model), workload, machines, PROBLEMS)
    except ConfigError as error:
        return f"  {gpu}: no plan of this run ({error})"
    peak, usable = plan.learner_peak.total / 1e9, plan.usable / 1e9
    return (
        f"  {gpu}: expect {peak:.1f} of {usable:.0f} GB at the learner's peak; {plan.seconds:,.0f} s a step, of them "
        f"{plan.learn_seconds:,.0f} learning (`spiral-fast plan` says what this assumes)"
        + "".join(f"; may not fit: {problem}" for problem in plan.problems)
    )
