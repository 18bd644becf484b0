"""`spiral-fast plan`: what a run needs on given GPUs, as tables and, if asked for, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spiral_fast.config import Config, ConfigError
from spiral_fast.plan.gpus import GPUS

if TYPE_CHECKING:
    from spiral_fast.plan.plan import Plan

MODES = {  # of Plan.work
    "flat": "flat: every trace alone",
    "set": "set: a prompt once for its traces",
    "tree": "tree: every token once",
    "pruned": "as run: dead traces left out",
}


def plan(
    config: Config,
    gpu: str,
    gpus: int,
    *,
    learner_gpus: int,
    model: Path | None,
    lengths: str | None,
    prompt_tokens: int | None,
    solve_rate: str,
    mfu: float,
    bandwidth: float,
    problems: int,
    json: Path | None,
) -> bool:
    """Print the plan; whether it fits. Raises ConfigError."""
    if gpu not in GPUS:
        raise ConfigError(f"--gpu: {gpu!r} is not known; there are: {', '.join(GPUS)}")
    for option, share in (("--mfu", mfu), ("--bandwidth", bandwidth)):
        if not 0 < share <= 1:
            raise ConfigError(f"{option}: {share} must be above 0 and at most 1")
    if json is not None:
        from spiral_fast.record.files import refuse_unwritable

        if json.is_dir():
            raise ConfigError(f"--json: {str(json)!r} is a folder; name a file")
        refuse_unwritable("--json", json.parent)
    rate = _solve_rate(solve_rate)
    from spiral_fast.plan.lengths import parse_lengths, usual_lengths

    law = usual_lengths(config.rollout) if lengths is None else parse_lengths(lengths)
    prompt_tokens = prompt_tokens or min(256, config.rollout.max_prompt_tokens)
    from spiral_fast.learner.empty_model import empty_model
    from spiral_fast.plan.plan import Machines, make_plan
    from spiral_fast.plan.shape import shape_of
    from spiral_fast.plan.simulated import Workload

    shape = shape_of(empty_model(config.model, model))
    machines = Machines(GPUS[gpu], gpu, gpus, learner_gpus, mfu, bandwidth)
    found = make_plan(config, shape, Workload(law, prompt_tokens, rate), machines, problems)
    _show(found, config)
    if json is not None:
        from spiral_fast.record.files import write_json

        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, found.as_json())
    return not found.problems


def _solve_rate(text: str) -> float | None:
    if text == "uniform":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ConfigError(f"--solve-rate: {text!r} must be a number in 0..1, or uniform")
    return rate


def _show(plan: Plan, config: Config) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for table in (_memory(plan), _learner(plan), _rollout(plan), _time(plan)):
        console.print(table)
        console.print()
    console.print("assumed, not measured:")
    for line in plan.assumptions:
        console.print(f"  {line}", markup=False)
    for line in plan.notes:
        console.print(f"worth knowing: {line}", markup=False)
    if not plan.problems:
        console.print("[green]it fits[/]")
    for line in plan.problems:
        console.print("[bold red]does not fit[/]:", end=" ")
        console.print(line, markup=False)


def _table(title: str, *columns: str):
    from rich.table import Column, Table

    first, *others = columns
    return Table(first, *(Column(name, justify="right") for name in others), title=title, title_justify="left")


def _memory(plan: Plan):
    """A column for each moment that can be the peak."""
    names = [moment.name for moment in plan.learner_moments]
    title = (
        f"memory, GB, of a GPU that learns: micro-batches of at most {plan.micro.tokens:,} tokens; "
        f"{plan.usable / 1e9:.0f} can be used"
    )
    table = _table(title, "part", *names)
    parts = dict.fromkeys(part for moment in plan.learner_moments for part in moment.parts)
    for part in parts:
        table.add_row(part, *(_gb(moment.parts.get(part, 0)) for moment in plan.learner_moments))
    peak = plan.learner_peak
    totals = (f"{_gb(m.total)}{' (peak)' if m is peak else ''}" for m in plan.learner_moments)
    table.add_row("[bold]sum[/]", *totals, end_section=True)
    table.add_row("largest tree that fits, tokens", f"{plan.largest_tree:,}")
    for part, size in plan.host_memory.items():
        if size:
            table.add_row(f"in host memory: {part}", _gb(size))
    return table


def _learner(plan: Plan):
    table = _table("learner, a step", "", "million tokens", "PFLOP", "FLOPs against flat", "micro-batches")
    flat = plan.work["flat"].flops
    for name, label in MODES.items():
        work = plan.work[name]
        table.add_row(
            label,
            f"{work.tokens / 1e6:,.1f}",
            f"{work.flops / 1e15:,.1f}",
            f"{flat / work.flops:.2f} x fewer" if work.flops else "",
            f"{work.micro_batches:,.0f}",
        )
    return table


def _rollout(plan: Plan):
    one, n = plan.rollout, plan.servers
    title = f"rollout, a step: {plan.drawn:,} problems drawn ({plan.liveness.share:.0%} live) on {n} x {plan.engine}"
    table = _table(title, "of one server", "prefill", "decode")
    table.add_row("tokens", f"{one.prefill_tokens:,} of {one.prompt_tokens:,} in prompts", f"{one.generated:,} sampled")
    table.add_row("PFLOP", f"{one.prefill_flops / 1e15:,.1f}", f"{one.decode_flops / 1e15:,.1f}")
    passes = f"{one.decode_passes:,} of {one.generated / max(1, one.decode_passes):.0f} requests"
    table.add_row("passes", "", passes)
    table.add_row("TB read", "", f"{one.decode_bytes / 1e12:,.0f}")
    table.add_row("seconds", f"{one.prefill_seconds:,.0f}", f"{one.decode_seconds:,.0f}")
    unshared = f"{one.decode_bytes_unshared / 1e12:,.0f} TB, {one.decode_seconds_unshared:,.0f} seconds"
    table.add_row("if each request reads its own prompt", "", unshared, end_section=True)
    for part, size in plan.rollout_memory.parts.items():
        table.add_row(f"GB: {part}", _gb(size))
    table.add_row("tokens of KV there is room for", f"{plan.kv_tokens:,}", f"{one.most_tokens:,} used")
    return table


def _time(plan: Plan):
    table = _table("a step", "", "seconds", "share")
    sync = f"adapter to {plan.servers} server{'s' * (plan.servers > 1)}, {plan.sync_bytes / 1e9:.2f} GB"
    rows = {"rollout": plan.rollout.seconds, "learning": plan.learn_seconds, sync: plan.sync_seconds}
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds:,.0f}", f"{seconds / plan.seconds:.0%}")
    table.add_row("[bold]sum[/]", f"{plan.seconds:,.0f}", "", end_section=True)
    table.add_row(f"GPU-hours, {plan.gpus} GPU{'s' * (plan.gpus > 1)}", f"{plan.gpu_hours:.2f}")
    table.add_row(f"GPU-hours of {plan.steps:,} steps", f"{plan.steps * plan.gpu_hours:,.0f}")
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}" if size else ""
