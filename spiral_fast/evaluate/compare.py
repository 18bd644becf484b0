"""Evaluations of the same problems beside each other: paired differences, and one page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import numpy as np

from spiral_fast.config import ConfigError
from spiral_fast.evaluate.bootstrap import bootstrap_interval
from spiral_fast.evaluate.budget import rsa_name
from spiral_fast.evaluate.plots import LEGIBLE, figures
from spiral_fast.evaluate.table import lines, number
from spiral_fast.record.charts import svg
from spiral_fast.record.page import gallery, page, table

RESAMPLES, SEED = 2000, 0


def check_comparable(evaluations: Mapping[str, dict]) -> None:
    """Raise ConfigError unless all have the same problems and as many search traces of each."""
    first, reference = next(iter(evaluations.items()))
    for label, evaluation in evaluations.items():
        if [row["id"] for row in evaluation["per_problem"]] != [row["id"] for row in reference["per_problem"]]:
            sizes = f"{reference['problems']} and {evaluation['problems']}"
            raise ConfigError(f"{first} and {label} are evaluations of different problems ({sizes} of them)")
        if evaluation["problems_digest"] != reference["problems_digest"]:
            raise ConfigError(
                f"{first} and {label} are evaluations of different problems: the ids are the same, the questions or "
                "answers are not (evaluate them with the same seed and problems)"
            )
        if evaluation["samples"] != reference["samples"]:
            raise ConfigError(
                f"{first} has {reference['samples']} search traces per problem, {label} {evaluation['samples']}: "
                "evaluate them with the same evaluate.samples"
            )


def differences(evaluations: Mapping[str, dict]) -> dict[str, dict[str, dict[str, Any]]]:
    """[label][metric] = {"difference", "interval"} of each evaluation after the first, minus the first: paired, that
    is, the mean of the problems' differences and its bootstrap interval. Metrics that both have."""
    (_, reference), *others = evaluations.items()
    base = dict(_columns(reference))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for label, evaluation in others:
        found[label] = {}
        for metric, values in _columns(evaluation):
            if metric in base:
                paired = values - base[metric]
                interval = bootstrap_interval(paired, RESAMPLES, SEED)
                found[label][metric] = {"difference": float(paired.mean()), "interval": interval}
    return found


def comparison_page(evaluations: Mapping[str, dict]) -> str:
    """HTML with the figures laid over each other, every number, and the differences."""
    first, *others = evaluations
    reference = evaluations[first]
    numbers = table(["", *evaluations], [[name, *cells] for name, cells in lines(evaluations)])
    body = (
        f"<h1>{escape(' · '.join(evaluations))}</h1>\n"
        f"<p>{reference['problems']} problems, {reference['samples']} search traces each. In brackets: "
        f"{reference['intervals']['level']:.0%} bootstrap intervals over the problems; in "
        "parentheses: aggregations, few = of fewer than 10 problems. RSA a/b: recursive self-aggregation with a "
        "population of a and sets of b. pass (oracle) needs somebody who knows the right answer.</p>\n"
        f"{_left_out(evaluations)}{gallery(svg(figure) for figure in figures(evaluations).values())}\n"
    )
    if others:
        found = differences(evaluations)
        metrics = dict.fromkeys(metric for label in others for metric in found[label])
        rows = []
        for metric in metrics:
            pairs = [found[label].get(metric) for label in others]
            rows.append([metric, *(number(p["difference"], p["interval"], "+") if p else "" for p in pairs)])
        body += (
            f"<h2>Differences to {escape(first)}</h2>\n<p>Problem by problem. Where an interval does not hold 0, other "
            "problems of this kind would likely show a difference too; each interval misses in about one case of "
            f"twenty, and none says what another training run would give.</p>\n{table(['', *others], rows)}\n"
        )
    return page(f"spiral-fast: {', '.join(evaluations)}", f"{body}<h2>Every number</h2>\n{numbers}")


def _left_out(evaluations: Mapping[str, dict]) -> str:
    if len(evaluations) <= LEGIBLE:
        return ""
    return (
        f"<p>The figures of token budgets and of candidates show the first and the last of the {len(evaluations)}.</p>"
    )


def _columns(evaluation: dict) -> Iterator[tuple[str, np.ndarray]]:
    """(metric, (P,) its value of each problem)"""
    rows = evaluation["per_problem"]
    for key, name in (
        ("pass_at_k", "pass@{}"),
        ("majority_at_k", "majority@{}"),
        ("lengths", "pass@1, first {} tokens"),
    ):
        for k in rows[0][key]:
            yield name.format(k), np.array([row[key][k] for row in rows])
    for i, shape in enumerate(evaluation["rsa_shapes"]):
        for step in range(len(shape["rsa"])):
            values = np.array([row["rsa_shapes"][i][step] for row in rows])
            yield f"{rsa_name(shape['population'], shape['set_size'])} step {step}", values
