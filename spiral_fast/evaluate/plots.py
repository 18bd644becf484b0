"""Figures of one or several evaluations laid over each other. No global matplotlib state, no display."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FIGURES = ("pass_at_k", "majority_at_k", "rsa")


def figures(evaluations: Mapping[str, dict]) -> dict[str, Figure]:
    """Figures by name (of FIGURES) of evaluations by label; a metric nobody measured has none.

    An evaluation is what `evaluate` returns. Bands and bars are its bootstrap intervals over the problems.
    """
    draw = dict(zip(FIGURES, (_pass_at_k, _majority_at_k, _rsa), strict=True))
    measured = [metric for metric in draw if any(evaluation[metric] for evaluation in evaluations.values())]
    return {metric: draw[metric](evaluations) for metric in measured}


def _pass_at_k(evaluations: Mapping[str, dict]) -> Figure:
    figure, axes = _axes("pass@k", "k, independent search traces", "problems solved by at least one")
    for label, evaluation in evaluations.items():
        ks, points = zip(*evaluation["pass_at_k"].items(), strict=True)
        intervals = [evaluation["intervals"]["pass_at_k"][k] for k in ks]
        _line(axes, [int(k) for k in ks], points, intervals, label)
    _ticks(axes, sorted({int(k) for e in evaluations.values() for k in e["pass_at_k"]}), log=True)
    return figure


def _majority_at_k(evaluations: Mapping[str, dict]) -> Figure:
    figure, axes = _axes(
        "majority@k", "k, independent search traces that vote", "problems whose majority answer is correct"
    )
    width = 0.8 / len(evaluations)
    ks = sorted({int(k) for e in evaluations.values() for k in e["majority_at_k"]})
    for i, (label, evaluation) in enumerate(evaluations.items()):
        present = [k for k in ks if str(k) in evaluation["majority_at_k"]]
        points = [evaluation["majority_at_k"][str(k)] for k in present]
        intervals = [evaluation["intervals"]["majority_at_k"][str(k)] for k in present]
        where = [ks.index(k) + (i - (len(evaluations) - 1) / 2) * width for k in present]
        errors = [
            [max(0.0, p - low) for p, (low, _) in zip(points, intervals, strict=True)],
            [max(0.0, high - p) for p, (_, high) in zip(points, intervals, strict=True)],
        ]
        axes.bar(where, points, width, yerr=errors, capsize=3, label=label)
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.legend(frameon=False)
    return figure


def _rsa(evaluations: Mapping[str, dict]) -> Figure:
    figure, axes = _axes("recursive self-aggregation", "aggregation steps", "correct traces of the population (pass@1)")
    for label, evaluation in evaluations.items():
        points = evaluation["rsa"]
        if points:
            _line(axes, list(range(len(points))), points, evaluation["intervals"]["rsa"], label)
    _ticks(axes, list(range(max(len(e["rsa"]) for e in evaluations.values()))), log=False)
    return figure


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, 4))
    axes = figure.add_axes((0.11, 0.12, 0.87, 0.8))
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, 1))
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Axes, x: list[int], points, intervals, label: str) -> None:
    (line,) = axes.plot(x, points, marker="o", label=label)
    axes.fill_between(x, *zip(*intervals, strict=True), color=line.get_color(), alpha=0.15, linewidth=0)


def _ticks(axes: Axes, values: list[int], log: bool) -> None:
    if log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(v) for v in values])
    axes.legend(frameon=False)
