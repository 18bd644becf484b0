"""eval.json from the numbers of its problems; every key is described in docs/evaluation.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spiral_fast.config import Config
from spiral_fast.evaluate.bootstrap import LEVEL, bootstrap_interval
from spiral_fast.evaluate.budget import LENGTH, MAJORITY, ORACLE, rsa_name
from spiral_fast.evaluate.measure import Measured
from spiral_fast.evaluate.verification import PARTS, verification
from spiral_fast.problems.digest import digest
from spiral_fast.rewards.grader import CORRECT, COULD_NOT_GRADE, Verdict, check_ungradable


def summarise(measured: Sequence[Measured], config: Config, step: int) -> dict[str, Any]:
    """Means over the problems, an interval beside each, costs. Raises TooManyUngradable."""
    _check(measured, config)
    rows = [one.row for one in measured]
    means, intervals = _means(rows, config)
    shapes = _shapes(measured, config)
    stages = [_describe([one.search for one in measured])]
    aggregations = [stage for shape in shapes for stage in shape["stages"]]
    tokens = [stage["tokens"] for stage in stages + aggregations]
    return {
        "step": step,
        "problems": len(rows),
        "problems_digest": digest(one.problem for one in measured),
        "samples": rows[0]["samples"],
        **means,
        "rsa_shapes": shapes,
        "intervals": intervals,
        "search_entropy": stages[0]["entropy"],
        "tokens": {name: sum(stage[name] for stage in tokens) for name in tokens[0]},
        "stages": stages + (shapes[0]["stages"] if shapes else []),
        "budget": _budget(measured, means, intervals, shapes, config),
        "per_problem": rows,
    }


def _means(rows: list[dict], config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the columns of `per_problem`: means, and intervals under the same keys."""
    means: dict[str, Any] = {}
    intervals: dict[str, Any] = {"level": LEVEL}
    for metric in ("pass_at_k", "majority_at_k", "lengths"):
        both = {k: _column([row[metric][k] for row in rows], config) for k in rows[0][metric]}
        means[metric] = {k: mean for k, (mean, _) in both.items()}
        intervals[metric] = {k: interval for k, (_, interval) in both.items()}
    means["rsa"], intervals["rsa"] = _columns([row["rsa"] for row in rows], config)
    means["distinct_answers"], intervals["distinct_answers"] = _column(
        [row["distinct_answers"] for row in rows], config
    )
    return means, intervals


def _column(values: Sequence[float], config: Config) -> tuple[float, list[float]]:
    return float(np.mean(values)), bootstrap_interval(values, config.evaluate.bootstrap, config.seed)


def _columns(rows: list[list[float]], config: Config) -> tuple[list[float], list[list[float]]]:
    both = [_column(column, config) for column in zip(*rows, strict=True)]
    return [mean for mean, _ in both], [interval for _, interval in both]


def _shapes(measured: Sequence[Measured], config: Config) -> list[dict[str, Any]]:
    """Each shape of recursive self-aggregation: accuracy by step, costs by step, verification ability."""
    result = []
    for i, shape in enumerate(config.evaluate.rsa_shapes):
        rsa, intervals = _columns([one.row["rsa_shapes"][i] for one in measured], config)
        counts = np.array([one.candidates[i] for one in measured])  # (P, steps, set_size + 1, 6)
        parts = dict(zip(PARTS, (counts[:, 0], counts.sum(axis=1)), strict=True))
        result.append(
            {
                "population": shape.population,
                "set_size": shape.set_size,
                "rsa": rsa,
                "intervals": intervals,
                "stages": [_describe([one.steps[i][step] for one in measured]) for step in range(shape.steps)],
                "verification": {
                    name: verification(part, config.evaluate.bootstrap, config.seed) for name, part in parts.items()
                },
            }
        )
    return result


def _describe(sums: list[dict[str, float]]) -> dict[str, Any]:
    """What one stage's traces look like and cost."""
    total = {name: sum(one[name] for one in sums) for name in sums[0]}
    traces = total["traces"]
    return {
        "traces": traces,
        "mean_length": total["generated"] / traces,
        # nats per token; a ratio of two random sums: consistent, with a bias that falls as 1 / traces
        "entropy": -total["logp"] / total["generated"],
        "cut_share": total["cut"] / traces,
        "no_answer_share": total["no_answer"] / traces,
        "could_not_grade_share": total["could_not_grade"] / traces,
        "tokens": {name: total[name] for name in ("prompt", "cached", "computed", "generated")},
    }


def _budget(
    measured: Sequence[Measured], means: dict, intervals: dict, shapes: list[dict], config: Config
) -> list[dict[str, Any]]:
    """Accuracy against mean tokens per problem, one entry per method and setting."""
    accuracy = {
        (LENGTH, int(limit)): (means["lengths"][limit], intervals["lengths"][limit]) for limit in means["lengths"]
    }
    full = [one.row["correct"] / one.row["samples"] for one in measured]
    accuracy[LENGTH, config.rollout.search_max_new_tokens] = _column(full, config)
    for method, metric in ((MAJORITY, "majority_at_k"), (ORACLE, "pass_at_k")):
        accuracy |= {(method, int(k)): (means[metric][k], intervals[metric][k]) for k in means[metric]}
    for shape in shapes:
        name = rsa_name(shape["population"], shape["set_size"])
        accuracy |= {(name, t): pair for t, pair in enumerate(zip(shape["rsa"], shape["intervals"], strict=True)) if t}
    points = []
    for same in zip(*(one.costs for one in measured), strict=True):
        key = (same[0].method, same[0].at)
        tokens = {name: float(np.mean([getattr(cost, name) for cost in same])) for name in same[0]._fields[2:]}
        value, interval = accuracy[key]
        points.append({"method": key[0], "at": key[1], **tokens, "accuracy": value, "interval": interval})
    return points


def _check(measured: Sequence[Measured], config: Config) -> None:
    items, verdicts = [], []
    for one in measured:
        items += [(one.problem, "", "")] * one.gradings
        verdicts += [Verdict(0.0, COULD_NOT_GRADE, None, reason) for reason in one.ungradable]
        verdicts += [Verdict(0.0, CORRECT, None)] * (one.gradings - len(one.ungradable))
    check_ungradable(items, verdicts, config)
