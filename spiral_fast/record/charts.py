"""The figures of a run's metrics as inline SVG. No display, no global matplotlib state."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum, isnan

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spiral_fast.record.run_folder import RunFolder

SMOOTHED_FROM = 40  # steps; longer runs show each step faintly, and the mean over the last WINDOW steps on top
WINDOW = 10


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    series: dict[str, str]  # metric key -> label
    log: bool = False


def _levels(prefix: str) -> dict[str, str]:
    return {prefix + level: level for level in ("search", "aggregation")}


CHARTS = (
    Chart("Reward by level", "mean reward of the traces drawn", _levels("reward/")),
    Chart(
        "Problems per step",
        "problems",
        {"problems/live": "live", "problems/dead": "dead", "problems/discarded": "discarded"},
    ),
    Chart("Live traces", "share with credit after the gate", _levels("credit/live_share_")),
    Chart("Gated traces", "share whose positive credit was gated", _levels("credit/gated_share_")),
    Chart("Size of credit", "mean |credit|", _levels("credit/abs_mean_")),
    Chart("Entropy by level", "nats per token", _levels("entropy/")),
    Chart("Distinct answers", "answers per problem, mean", _levels("answers/distinct_")),
    Chart(
        "Sets that contain a search trace",
        "sets",
        {f"sets/appearances_{name}": name for name in ("mean", "min", "max")},
    ),
    Chart("Length by level", "tokens, mean", _levels("length/")),
    Chart("Cut at the length limit", "share of traces", _levels("length/cut_share_")),
    Chart(
        "Gradient norm",
        "L2 norm before clipping",
        {"grad/norm": "both terms", "grad/norm_search": "search", "grad/norm_aggregation": "aggregation"},
        log=True,
    ),
    Chart("Cosine of the search and the aggregation gradient", "cosine", {"grad/cosine": "cosine"}),
    Chart(
        "Learner against engine: log-probs of the sampled tokens",
        "nats",
        {"logp_gap/mean": "mean |difference|", "logp_gap/max": "largest |difference|", "logp_gap/kl": "KL"},
        log=True,
    ),
    Chart(
        "Prompt tokens of the engine",
        "tokens per step",
        {"tokens/prompt": "logical", "tokens/computed": "computed", "tokens/cached": "from the cache"},
    ),
    Chart(
        "Tokens of the learner",
        "tokens per step",
        {
            "tokens/learner_logical": "logical",
            "tokens/learner_computed": "computed",
            "tokens/learner_trained": "sampled, with credit",
        },
    ),
    Chart(
        "Time by phase",
        "seconds per step",
        {"time/step": "step", "time/rollout": "rollout", "time/reward": "reward", "time/learn": "learn"},
    ),
    Chart(
        "Speed of the learner",
        "tokens a second",
        {"time/learner_tokens_per_s_logical": "logical", "time/learner_tokens_per_s_computed": "computed"},
    ),
    Chart("Model FLOPs utilisation of the learner", "share of the GPUs' peak", {"time/learner_mfu": "MFU"}),
    Chart("Memory", "MB, peak so far", {"time/peak_rss_mb": "resident", "time/peak_cuda_mb": "on the GPU"}),
)


def charts(run: RunFolder) -> Iterator[tuple[str, str]]:
    """(title, SVG) of every chart of which the run measured something."""
    steps = [row["step"] for row in run.metrics]
    for chart in CHARTS:
        series = chart.series | _higher_levels(chart, run)
        measured = {label: run.series(key) for key, label in series.items()}
        measured = {label: values for label, values in measured.items() if not all(map(isnan, values))}
        if measured:
            yield chart.title, svg(_figure(chart, steps, measured))


def _higher_levels(chart: Chart, run: RunFolder) -> dict[str, str]:
    """Of `rollout.levels`: what the levels above aggregation measured."""
    keys = sorted({key for row in run.metrics for key in row})
    found = [(key, re.fullmatch(r"(.*aggregation)_(\d+)", key)) for key in keys]
    return {key: f"{chart.series[m[1]]} {m[2]}" for key, m in found if m and m[1] in chart.series}


def svg(figure: Figure) -> str:
    """The figure as an <svg> element; its text stays text."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    return text[text.index("<svg") :]


def _figure(chart: Chart, steps: list[int], measured: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(6, 3.4))
    axes = figure.add_axes((0.13, 0.14, 0.85, 0.77))  # fixed: a computed layout draws every figure several times
    for label, values in measured.items():
        if len(steps) < SMOOTHED_FROM:
            axes.plot(steps, values, marker="o", markersize=3, linewidth=1.2, label=label)
        else:
            (line,) = axes.plot(steps, values, linewidth=0.8, alpha=0.3)
            axes.plot(steps, running_mean(values), linewidth=1.4, color=line.get_color(), label=label)
    axes.set(title=chart.title, xlabel="step", ylabel=chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lowest = min(value for values in measured.values() for value in values if not isnan(value))
    if chart.log and lowest > 0:
        axes.set_yscale("log")
    elif lowest >= 0:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(measured) > 1:
        axes.legend(frameon=False)
    return figure


def running_mean(values: list[float]) -> list[float]:
    """Of each value and the up to WINDOW - 1 before it; NaNs are left out."""
    means = []
    for i in range(len(values)):
        present = [value for value in values[max(0, i - WINDOW + 1) : i + 1] if not isnan(value)]
        means.append(fsum(present) / len(present) if present else float("nan"))
    return means
