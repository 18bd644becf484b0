"""Evaluations as a table for the console, one column per label."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table


def table(evaluations: Mapping[str, dict]) -> Table:
    """Each metric with its bootstrap interval; evaluations are what `evaluate` returns, by label."""
    columns = {label: dict(_lines(evaluation)) for label, evaluation in evaluations.items()}
    result = Table("metric", *columns)
    names = dict.fromkeys(name for column in columns.values() for name in column)
    for name in names:
        result.add_row(name, *(column.get(name, "") for column in columns.values()))
    return result


def _lines(evaluation: dict):
    intervals = evaluation["intervals"]

    def number(value: float, interval: list[float]) -> str:
        return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"

    for k, value in evaluation["pass_at_k"].items():
        yield f"pass@{k}", number(value, intervals["pass_at_k"][k])
    for k, value in evaluation["majority_at_k"].items():
        yield f"majority@{k}", number(value, intervals["majority_at_k"][k])
    for t, value in enumerate(evaluation["rsa"]):
        yield f"RSA step {t}", number(value, intervals["rsa"][t])
    yield "distinct answers", f"{evaluation['distinct_answers']:.1f} of {evaluation['samples']}"
    yield "search entropy", f"{evaluation['search_entropy']:.3f} nats/token"
    yield "search length", f"{evaluation['stages'][0]['mean_length']:.1f} tokens"
    tokens = evaluation["tokens"]
    yield "tokens generated", f"{tokens['generated']:,}"
    yield "prompt tokens", f"{tokens['prompt']:,}, of them computed {tokens['computed']:,}"
