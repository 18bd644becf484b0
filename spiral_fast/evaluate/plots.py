"""Figures of one or several evaluations laid over each other. No global matplotlib state, no display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spiral_fast.evaluate.budget import LENGTH, MAJORITY, ORACLE, rsa_name

FIGURES = ("pass_at_k", "majority_at_k", "rsa", "lengths", "budget_generated", "budget_total", "verification")
LEGIBLE = 4  # evaluations in a figure with a line per method; of more, the first and the last are drawn
STYLES = {LENGTH: (".", "-"), MAJORITY: ("s", "--"), ORACLE: ("^", ":")}
RSA_STYLES = (("o", "-"), ("P", "-."), ("X", "--"), ("v", ":"))


def figures(evaluations: Mapping[str, dict]) -> dict[str, Figure]:
    """Figures by name (of FIGURES) of evaluations by label; a metric nobody measured has none.

    An evaluation is what `evaluate` returns. Bands and bars are its bootstrap intervals over the problems.
    """
    evaluations = {_as_text(label): evaluation for label, evaluation in evaluations.items()}
    colors = _colors(list(evaluations))
    few = dict(evaluations)
    if len(few) > LEGIBLE:
        few = {label: few[label] for label in (next(iter(few)), list(few)[-1])}
    swept = {label: e for label, e in evaluations.items() if e.get("lengths")}
    costed = {label: e for label, e in few.items() if e.get("budget")}
    judged = {label: e for label, e in few.items() if e.get("rsa_shapes")}
    drawn = {
        "pass_at_k": (_pass_at_k, evaluations if any(e["pass_at_k"] for e in evaluations.values()) else {}),
        "majority_at_k": (_majority_at_k, evaluations if any(e["majority_at_k"] for e in evaluations.values()) else {}),
        "rsa": (_rsa, {label: e for label, e in evaluations.items() if e["rsa"]}),
        "lengths": (_lengths, swept),
        "budget_generated": (_budget_generated, costed),
        "budget_total": (_budget_total, costed),
        "verification": (_verification, judged),
    }
    return {name: draw(shown, colors) for name, (draw, shown) in drawn.items() if shown}


def _as_text(label: str) -> str:
    """For matplotlib, which sets $...$ as mathematics and leaves a label that begins with _ out of legends."""
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def _colors(labels: list[str]) -> dict[str, Any]:
    """One for each, the same in every figure."""
    if len(labels) <= 10:  # matplotlib's own cycle
        return {label: f"C{i}" for i, label in enumerate(labels)}
    return {label: colormaps["turbo"](i / (len(labels) - 1)) for i, label in enumerate(labels)}


def _pass_at_k(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
    figure, axes = _axes("pass@k", "k, independent search traces", "problems solved by at least one")
    for label, evaluation in evaluations.items():
        ks, points = zip(*evaluation["pass_at_k"].items(), strict=True)
        intervals = [evaluation["intervals"]["pass_at_k"][k] for k in ks]
        _line(axes, [int(k) for k in ks], points, intervals, label, color=colors[label])
    _ticks(axes, sorted({int(k) for e in evaluations.values() for k in e["pass_at_k"]}), log=True)
    return figure


def _majority_at_k(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
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
        axes.bar(where, points, width, yerr=_errors(points, intervals), capsize=3, label=label, color=colors[label])
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    _legend(axes)
    return figure


def _rsa(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
    figure, axes = _axes("recursive self-aggregation", "aggregation steps", "correct traces of the population (pass@1)")
    names: dict[str, tuple[str, str]] = {}
    steps = 0
    for label, evaluation in evaluations.items():
        for n, shape in enumerate(evaluation.get("rsa_shapes") or [_only_shape(evaluation)]):
            marker, dashes = names.setdefault(_shape_name(shape), RSA_STYLES[len(names) % len(RSA_STYLES)])
            style = {"label": None if n else label, "color": colors[label], "marker": marker, "linestyle": dashes}
            _line(axes, list(range(len(shape["rsa"]))), shape["rsa"], shape["intervals"], **style)
            steps = max(steps, len(shape["rsa"]))
    _ticks(axes, list(range(steps)), log=False)
    if len(names) > 1:
        _two_legends(axes, {label: colors[label] for label in evaluations}, names)
    return figure


def _only_shape(evaluation: dict) -> dict:
    """Of an evaluation that lists none."""
    return {"rsa": evaluation["rsa"], "intervals": evaluation["intervals"]["rsa"], "population": 0, "set_size": 0}


def _shape_name(shape: dict) -> str:
    return rsa_name(shape["population"], shape["set_size"])


def _lengths(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
    figure, axes = _axes("sequential compute", "limit of a search trace, tokens", "correct traces (pass@1)")
    limits = set()
    for label, evaluation in evaluations.items():
        points = [point for point in evaluation["budget"] if point["method"] == LENGTH]
        at = [point["at"] for point in points]
        _line(axes, at, [p["accuracy"] for p in points], [p["interval"] for p in points], label, color=colors[label])
        limits |= set(at)
    _ticks(axes, sorted(limits), log=max(limits) > 8 * min(limits))
    axes.set_ylim(top=min(1.0, 1.5 * max(axes.dataLim.y1, 0.01)))
    return figure


def _budget_generated(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
    title, axis = "accuracy against sampled tokens", "tokens generated per problem"
    return _budget(evaluations, colors, title, axis, ("generated",))


def _budget_total(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
    title, axis = "accuracy against all tokens", "tokens generated + prompt tokens per problem"
    return _budget(evaluations, colors, title, axis, ("generated", "prompt"))


def _budget(
    evaluations: Mapping[str, dict], colors: Mapping[str, Any], title: str, axis: str, counted: tuple[str, ...]
) -> Figure:
    figure, axes = _axes(title, axis, "accuracy", size=(8, 5.4))
    names: dict[str, tuple[str, str]] = {}
    for label, evaluation in evaluations.items():
        for method in dict.fromkeys(point["method"] for point in evaluation["budget"]):
            rsa = RSA_STYLES[len(names.keys() - STYLES) % len(RSA_STYLES)]
            marker, dashes = names.setdefault(method, STYLES.get(method, rsa))
            points = [point for point in evaluation["budget"] if point["method"] == method]
            x = [sum(point[name] for name in counted) for point in points]
            y = [point["accuracy"] for point in points]
            axes.plot(x, y, color=colors[label], marker=marker, markersize=4, linestyle=dashes, linewidth=1.2)
            intervals = [point["interval"] for point in points]
            axes.fill_between(x, *zip(*intervals, strict=True), color=colors[label], alpha=0.08, linewidth=0)
    axes.set_xscale("log", base=2)
    _two_legends(axes, {label: colors[label] for label in evaluations}, names)
    return figure


def _two_legends(axes: Axes, colors: Mapping[str, Any], styles: Mapping[str, tuple[str, str]]) -> None:
    """Colours for the evaluations, markers and dashes for the methods."""
    keys = [Line2D([], [], color=color, label=label) for label, color in colors.items()]
    keys += [
        Line2D([], [], color="#555", marker=marker, linestyle=dashes, markersize=4, label=method)
        for method, (marker, dashes) in styles.items()
    ]
    axes.legend(handles=keys, frameon=False, fontsize="small", ncols=2)


def _verification(evaluations: Mapping[str, dict], colors: Mapping[str, Any]) -> Figure:
    """Of each evaluation's first shape; open markers rest on few problems."""
    names = {label: _shape_name(evaluation["rsa_shapes"][0]) for label, evaluation in evaluations.items()}
    one = names[next(iter(names))] if len(set(names.values())) == 1 else None
    title = f"aggregation by its candidates ({one or 'RSA'}, all steps)"
    figure, axes = _axes(title, "right candidates in the set", "correct aggregations")
    most = 0
    for label, evaluation in evaluations.items():
        shape = evaluation["rsa_shapes"][0]
        cells = shape["verification"]["all_steps"]["by_right_candidates"]
        cells = [cell for cell in cells if cell["aggregations"]]
        x, y = [cell["right"] for cell in cells], [cell["correct"]["share"] for cell in cells]
        errors = _errors(y, [cell["correct"]["interval"] for cell in cells])
        color = colors[label]
        shown = label if one else f"{label}, {names[label]}"
        axes.errorbar(x, y, yerr=errors, color=color, capsize=3, marker="o", label=shown)
        few = [(a, b) for a, b, cell in zip(x, y, cells, strict=True) if cell["few"]]
        if few:
            axes.plot(*zip(*few, strict=True), "o", markerfacecolor="white", color=color, zorder=3)
        most = max(most, shape["set_size"])
    _ticks(axes, list(range(most + 1)), log=False)
    return figure


def _axes(title: str, x: str, y: str, size: tuple[float, float] = (6, 4)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    axes = figure.add_axes((0.11, 0.12, 0.87, 0.8))
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, 1))
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Axes, x: list[int], points, intervals, label: str | None, **style) -> None:
    (line,) = axes.plot(x, points, label=label, **({"marker": "o"} | style))
    axes.fill_between(x, *zip(*intervals, strict=True), color=line.get_color(), alpha=0.15, linewidth=0)


def _legend(axes: Axes) -> None:
    """In as many columns as keep it inside the figure."""
    labels = len(axes.get_legend_handles_labels()[1])
    axes.legend(frameon=False, **({"ncols": -(-labels // 10), "fontsize": "x-small"} if labels > 8 else {}))


def _errors(points: list[float], intervals: list[list[float]]) -> list[list[float]]:
    """As matplotlib wants them: distances below and above."""
    return [
        [max(0.0, p - low) for p, (low, _) in zip(points, intervals, strict=True)],
        [max(0.0, high - p) for p, (_, high) in zip(points, intervals, strict=True)],
    ]


def _ticks(axes: Axes, values: list[int], log: bool) -> None:
    if log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(v) for v in values])
    _legend(axes)
