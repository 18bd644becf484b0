"""A run's memory, work and time per step on given GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from spiral_fast.config import Config, ConfigError
from spiral_fast.levels import levels_of, max_new_tokens
from spiral_fast.plan.advice import BUS, NETWORK, assumptions, notes, problems
from spiral_fast.plan.gpus import Gpu
from spiral_fast.plan.learner_work import Work, learner_work
from spiral_fast.plan.memory import (
    Micro,
    Moment,
    crosses_the_bus,
    held_by_host,
    largest_tree,
    micro_of,
    moments,
    resting,
)
from spiral_fast.plan.rollout_work import Limits, Rates, RolloutWork, requests_of, rollout_work
from spiral_fast.plan.shape import Shape
from spiral_fast.plan.simulated import Liveness, Simulated, Workload, aggregates, liveness

LOOKED_AT = 256  # problems whose liveness is simulated


@dataclass(frozen=True)
class Machines:
    gpu: Gpu
    name: str
    gpus: int
    learner_gpus: int
    mfu: float  # of the peak FLOP/s, reached by large products
    bandwidth: float  # of the peak bandwidth, reached in decode


@dataclass
class Plan:
    """Bytes, FLOPs, seconds; of one step."""

    engine: str
    servers: int
    server_gpus: int  # of one server
    liveness: Liveness
    drawn: int  # problems rolled out in a step
    work: dict[str, Work]
    micro: Micro
    learner_moments: list[Moment]
    rollout_memory: Moment  # of the GPU with the KV cache
    usable: float
    largest_tree: int
    kv_tokens: int  # keys and values a server has room for
    longest: int  # tokens of the longest sequence that can come up
    rollout: RolloutWork  # of one server
    learn_seconds: float
    sync_bytes: float
    sync_seconds: float
    gpus: int
    steps: int
    host_memory: dict[str, float]  # of a rank, for what is offloaded
    assumptions: list[str]
    notes: list[str]
    problems: list[str] = field(default_factory=list)  # why it cannot run as it is, and what to change

    @property
    def learner_peak(self) -> Moment:
        return max(self.learner_moments, key=lambda moment: moment.total)

    @property
    def seconds(self) -> float:
        return self.rollout.seconds + self.learn_seconds + self.sync_seconds

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600

    def as_json(self) -> dict[str, Any]:
        derived = {"seconds": self.seconds, "gpu_hours": self.gpu_hours, "learner_peak": self.learner_peak.name}
        return asdict(self) | derived | {"rollout_seconds": self.rollout.seconds, "fits": not self.problems}


def make_plan(config: Config, shape: Shape, workload: Workload, machines: Machines, n_problems: int) -> Plan:
    """n_problems: live problems whose tokens are simulated; a step's figures are scaled from them. Raises ConfigError
    for a layout that this version cannot run."""
    gpu, settings = machines.gpu, config.rollout
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype: {config.model.dtype!r}: the GPUs' rates are of bfloat16; use it here too")
    if config.model.quantisation != "none":
        raise ConfigError(f"model.quantisation: {config.model.quantisation!r}: `plan` counts a base in bfloat16 alone")
    if workload.prompt_tokens > settings.max_prompt_tokens:
        raise ConfigError(
            f"--prompt-tokens: {workload.prompt_tokens} is above rollout.max_prompt_tokens "
            f"({settings.max_prompt_tokens})"
        )
    engine = "radix" if settings.engine == "radix" else "sglang"
    servers, server_gpus = _servers(config, machines, engine)
    simulated = Simulated(config, workload)
    seen, live = liveness(simulated, LOOKED_AT)
    if not live:
        raise ConfigError(f"--solve-rate: none of {LOOKED_AT} simulated problems is live; give a rate between 0 and 1")
    rollouts = simulated.rollouts(live[:n_problems])
    factor = config.batch.live_problems / len(rollouts)
    work = {name: one.times(factor) for name, one in learner_work(rollouts, config, shape.cost).items()}

    longest = longest_sequence(config)
    most = max(config.learner.micro_batch_tokens, longest)
    ranks = servers if engine == "radix" else machines.learner_gpus
    micro = micro_of(config, most, ranks, round(work["pruned"].rows / ranks))
    colocated = machines.gpus == ranks
    learner = moments(shape, micro)
    server_weights = (shape.base_bytes + shape.adapter_bytes) / server_gpus
    if colocated and engine == "sglang":
        learner = [Moment(m.name, m.parts | {"SGLang: weights": server_weights}) for m in learner]
    rollout_memory, kv_tokens = _kv(config, shape, micro, gpu, engine, colocated, server_weights, server_gpus)

    round_problems = config.batch.round_problems or config.batch.live_problems
    needed = config.batch.live_problems / seen.share
    rounds = min(-(-needed // round_problems), config.batch.max_rounds)
    drawn = int(rounds * round_problems)
    outlines = [requests_of(r, two_adapters=config.model.policy == "two_adapters") for r in rollouts]
    of_server = [outlines[i % len(outlines)] for i in range(-(-drawn // servers))]
    rates = Rates(machines.mfu * gpu.flops * server_gpus, machines.bandwidth * gpu.bandwidth * server_gpus)
    limits = Limits(settings.max_running, max(kv_tokens, longest), settings.prefill_chunk)
    run = work["pruned"]
    executed = run.flops + (run.recomputed if config.learner.checkpointing else 0)
    bus = crosses_the_bus(shape, micro, run.tokens / ranks, run.micro_batches / ranks)
    sync_bytes = shape.adapter_bytes * (4 / 3 if engine == "sglang" else 0) * servers  # base64
    plan = Plan(
        engine,
        servers,
        server_gpus,
        seen,
        drawn,
        work,
        micro,
        learner,
        rollout_memory,
        gpu.usable,
        largest_tree(shape, gpu.usable - (server_weights if colocated and engine == "sglang" else 0), micro),
        kv_tokens,
        longest,
        rollout_work(shape, of_server, rates, limits),
        executed / (machines.mfu * gpu.flops * ranks) + bus / BUS,
        sync_bytes,
        sync_bytes / NETWORK,
        machines.gpus,
        config.learner.steps,
        held_by_host(shape, micro),
        assumptions(config, workload, machines, engine, len(rollouts)),
        notes(config, drawn, seen, colocated and engine == "sglang", rollout_memory, gpu),
    )
    plan.problems = problems(plan, config, shape, machines)
    return plan


def longest_sequence(config: Config) -> int:
    """Prompt and new tokens, from full-length traces; the templates' own words are a few hundred tokens."""
    settings, frame = config.rollout, 256
    prompt = settings.max_prompt_tokens
    longest = prompt + settings.search_max_new_tokens
    for number, level in enumerate(levels_of(config) if aggregates(config) else [], start=1):
        quoted = max(level.set_sizes) * max_new_tokens(config, number - 1)
        longest = max(longest, prompt + frame + quoted + level.max_new_tokens)
    return longest


def _servers(config: Config, machines: Machines, engine: str) -> tuple[int, int]:
    """How many servers, and GPUs of each."""
    if machines.gpus == 1:
        return 1, 1
    if engine == "radix":  # each rank of the learner samples and learns in turns
        if machines.learner_gpus not in (1, machines.gpus):
            raise ConfigError(
                f"--learner-gpus: {machines.learner_gpus} of {machines.gpus}: with rollout.engine radix all learn and "
                "sample in turns; leave it out"
            )
        return machines.gpus, 1
    if machines.learner_gpus >= machines.gpus:
        raise ConfigError(
            f"--learner-gpus: {machines.learner_gpus} of {machines.gpus} GPUs leave none for SGLang servers"
        )
    tensor_parallel = config.rollout.sglang.tensor_parallel
    servers = (machines.gpus - machines.learner_gpus) // tensor_parallel
    if not servers:
        raise ConfigError(
            f"rollout.sglang.tensor_parallel: {tensor_parallel} GPUs for a server, but --gpus {machines.gpus} leaves "
            f"{machines.gpus - machines.learner_gpus} beside the learner's"
        )
    return servers, tensor_parallel


def _kv(
    config: Config,
    shape: Shape,
    micro: Micro,
    gpu: Gpu,
    engine: str,
    colocated: bool,
    server_weights: float,
    server_gpus: int,
) -> tuple[Moment, int]:
    """Memory during rollout of a GPU that holds keys and values; tokens of them that a server has room for."""
    parts: dict[str, float] = {}
    if colocated:
        parts = resting(shape, micro, sampling=engine == "radix")
    if engine == "radix":
        cache = config.rollout.cache_tokens * shape.kv_bytes
        # on a GPU each running prompt is also copied (rollout/radix/engine.py), at most the tree's tokens
        parts |= {"KV cache": cache, "copies of running prompts": cache}
        return Moment("rollout", parts), config.rollout.cache_tokens
    parts["SGLang: weights"] = server_weights
    room = gpu.usable - sum(parts.values())
    fraction = config.rollout.sglang.memory_fraction
    if fraction is not None:
        room = fraction * gpu.memory - server_weights
    parts["KV cache"] = max(0.0, room)
    return Moment("rollout", parts), int(parts["KV cache"] * server_gpus / shape.kv_bytes)
