"""Evaluations as a table for the console and for pages, one column per label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.markup import escape
from rich.table import Table

from spiral_fast.evaluate.budget import rsa_name


def table(evaluations: Mapping[str, dict]) -> Table:
    """Each metric with its bootstrap interval; evaluations are what `evaluate` returns, by label."""
    result = Table("metric", *map(escape, evaluations))
    for name, cells in lines(evaluations):
        result.add_row(name, *cells)
    return result


def lines(evaluations: Mapping[str, dict]) -> list[tuple[str, list[str]]]:
    """(metric, a cell per evaluation) of everything anybody measured."""
    columns = [dict(_lines(evaluation)) for evaluation in evaluations.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def number(value: float, interval: list[float], sign: str = "") -> str:
    """`sign` "+" shows the sign of positive numbers too."""
    return f"{value:{sign}.3f} [{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}]"


def _lines(evaluation: dict) -> Iterator[tuple[str, str]]:
    intervals = evaluation["intervals"]
    for k, value in evaluation["pass_at_k"].items():
        yield f"pass@{k}", number(value, intervals["pass_at_k"][k])
    for k, value in evaluation["majority_at_k"].items():
        yield f"majority@{k}", number(value, intervals["majority_at_k"][k])
    for limit, value in evaluation["lengths"].items():
        yield f"pass@1, first {limit} tokens", number(value, intervals["lengths"][limit])
    shapes = evaluation["rsa_shapes"]
    for shape in shapes:
        for t, value in enumerate(shape["rsa"]):
            yield f"{_name(shape)} step {t}", number(value, shape["intervals"][t])
    for shape in shapes:
        yield from _verification(shape)
    yield "distinct answers", f"{evaluation['distinct_answers']:.1f} of {evaluation['samples']}"
    yield "search entropy", f"{evaluation['search_entropy']:.3f} nats/token"
    yield "search length", f"{evaluation['stages'][0]['mean_length']:.1f} tokens"
    tokens = evaluation["tokens"]
    yield "tokens generated", f"{tokens['generated']:,}"
    yield "prompt tokens", f"{tokens['prompt']:,}, of them computed {tokens['computed']:,}"


def _verification(shape: dict) -> Iterator[tuple[str, str]]:
    """Shares of the aggregations of all steps; (n) aggregations lie below, `few`: of fewer than 10 problems."""
    found = shape["verification"]["all_steps"]
    for cell in found["by_right_candidates"]:
        name = f"{_name(shape)} correct, {cell['right']} of {shape['set_size']} candidates right"
        yield name, _share(cell, "correct")
    mixed = "mixed candidates"
    for key, words in (
        ("picks_right", "gives a right candidate's answer"),
        ("picks_wrong", "gives a wrong candidate's answer"),
        ("new_answer", "gives a new answer"),
        ("right_of_picked", "right, of those that repeat a candidate"),
        ("chance", "a candidate at random is right"),
    ):
        yield f"{_name(shape)} {mixed}: {words}", _share(found["mixed"], key)
    for key, words in (("new_answer", "gives a new answer"), ("correct", "correct")):
        yield f"{_name(shape)} all candidates wrong: {words}", _share(found["all_wrong"], key)


def _share(cell: dict, key: str) -> str:
    share = cell[key]
    if share["share"] is None:
        return "none (0)"
    count = f"({share['of']:,}{', few' if cell['few'] else ''})"
    return f"{number(share['share'], share['interval'])} {count}"


def _name(shape: dict) -> str:
    return rsa_name(shape["population"], shape["set_size"])
