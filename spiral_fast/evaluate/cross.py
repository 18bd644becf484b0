"""Cross-pairing: the search of one checkpoint, aggregated by another.

Each search checkpoint's population is sampled once; every aggregation checkpoint aggregates the same sets of it with
the same random streams, one step of recursive self-aggregation. Cells are compared problem by problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from spiral_fast.config import Config
from spiral_fast.evaluate.bootstrap import LEVEL, bootstrap_interval
from spiral_fast.evaluate.sampling import ProblemSamples, Sampler
from spiral_fast.evaluate.stage import Sample
from spiral_fast.evaluate.store import Store, chunks
from spiral_fast.evaluate.verification import candidate_counts, verification
from spiral_fast.problems.digest import digest
from spiral_fast.trace import Problem


def cross_traces(config: Config, n_search: int, n_aggregation: int, n_problems: int) -> int:
    """Traces that a matrix samples."""
    return n_search * (1 + n_aggregation) * config.evaluate.rsa_shapes[0].population * n_problems


def sample_cross(
    config: Config,
    search: Sequence[str],
    aggregation: Sequence[str],
    problems: Sequence[Problem],
    sampler: Sampler,
    store: Store,
    use: Callable[[str], None],
    stored: Callable[[int], None],
) -> None:
    """Sample what `store` lacks. `use(label)` puts that checkpoint's weights in place and empties the engine's cache;
    `stored(n)` is told of n traces that were there already."""
    shape = config.evaluate.rsa_shapes[0]
    parts = _parts(config, problems)

    def each(label: str, name: str, sample: Callable[[Sequence[Problem], int], list[ProblemSamples]]) -> None:
        for number, part in enumerate(parts):
            if store.has(f"{name}_{number:06d}"):
                stored(len(part) * shape.population)
                continue
            use(label)
            store.write(f"{name}_{number:06d}", sample(part, number))

    for label in search:

        def populations(part: Sequence[Problem], number: int) -> list[ProblemSamples]:
            traces = sampler.search(part, shape.population)
            return [ProblemSamples(problem, one, []) for problem, one in zip(part, traces, strict=True)]

        each(label, f"search_{label}", populations)
    for label in aggregation:
        for searcher in search:

            def aggregations(part: Sequence[Problem], number: int, searcher: str = searcher) -> list[ProblemSamples]:
                population = [
                    one.search for one in store.read(f"search_{searcher}_{number:06d}", part, shape.population)
                ]
                traces = sampler.aggregate(part, population, shape.set_size, 1)
                return [ProblemSamples(problem, [], [[one]]) for problem, one in zip(part, traces, strict=True)]

            each(label, f"pair_{searcher}_{label}", aggregations)


def summarise_cross(
    config: Config, search: Sequence[str], aggregation: Sequence[str], problems: Sequence[Problem], store: Store
) -> dict[str, Any]:
    """cross.json; every key is described in docs/evaluation.md."""
    shape = config.evaluate.rsa_shapes[0]
    parts = _parts(config, problems)

    def traces(name: str) -> list[list[Sample]]:
        """[problem][trace]"""
        read = (store.read(f"{name}_{number:06d}", part, shape.population) for number, part in enumerate(parts))
        return [one.search or one.rsa[0][0] for part in read for one in part]

    def accuracies(sampled: list[list[Sample]]) -> np.ndarray:
        """(P,) share of correct traces"""
        return np.array([np.mean([trace.correct for trace in some]) for some in sampled])

    def verify(before: list[list[Sample]], after: list[list[Sample]]) -> dict[str, Any]:
        counts = [candidate_counts(b, a, shape.set_size) for b, a in zip(before, after, strict=True)]
        return verification(np.array(counts), config.evaluate.bootstrap, config.seed)

    def interval(values: np.ndarray) -> list[float]:
        return bootstrap_interval(values, config.evaluate.bootstrap, config.seed)

    def difference(values: np.ndarray) -> dict[str, Any]:
        return {"difference": float(values.mean()), "interval": interval(values)}

    populations, cells, verified = {}, {}, {}
    for s in search:
        before = traces(f"search_{s}")
        after = {a: traces(f"pair_{s}_{a}") for a in aggregation}
        populations[s] = accuracies(before)
        cells[s] = {a: accuracies(sampled) for a, sampled in after.items()}
        verified[s] = {a: verify(before, sampled) for a, sampled in after.items()}
    first_s, first_a = search[0], aggregation[0]
    return {
        "problems": len(problems),
        "problems_digest": digest(problems),
        "population": shape.population,
        "set_size": shape.set_size,
        "search": list(search),
        "aggregation": list(aggregation),
        "search_accuracy": {s: float(values.mean()) for s, values in populations.items()},
        "matrix": {s: {a: float(values.mean()) for a, values in row.items()} for s, row in cells.items()},
        "intervals": {
            "level": LEVEL,
            "search_accuracy": {s: interval(values) for s, values in populations.items()},
            "matrix": {s: {a: interval(values) for a, values in row.items()} for s, row in cells.items()},
        },
        "search_effect": {
            s: {a: difference(cells[s][a] - cells[first_s][a]) for a in aggregation} for s in search if s != first_s
        },
        "aggregation_effect": {
            s: {a: difference(cells[s][a] - cells[s][first_a]) for a in aggregation if a != first_a} for s in search
        },
        "verification": verified,
        "per_problem": [
            {
                "id": problem.id,
                "search": {s: float(populations[s][p]) for s in search},
                "matrix": {s: {a: float(cells[s][a][p]) for a in aggregation} for s in search},
            }
            for p, problem in enumerate(problems)
        ],
    }


def heat_map(result: Mapping[str, Any]) -> Figure:
    """Rows search, columns aggregation; the first column is the search alone."""
    search, aggregation = result["search"], result["aggregation"]
    intervals = result["intervals"]
    numbers = [[result["search_accuracy"][s], *(result["matrix"][s][a] for a in aggregation)] for s in search]
    bounds = [[intervals["search_accuracy"][s], *(intervals["matrix"][s][a] for a in aggregation)] for s in search]
    figure = Figure(figsize=(2.4 + 1.4 * len(numbers[0]), 1.8 + 0.8 * len(search)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(numbers, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, (values, pairs) in enumerate(zip(numbers, bounds, strict=True)):
        for column, (value, (low, high)) in enumerate(zip(values, pairs, strict=True)):
            color = "black" if value > 0.6 else "white"
            text = f"{value:.3f}\n[{low:.3f}, {high:.3f}]"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize="small")
    axes.axvline(0.5, color="white", linewidth=4)
    axes.set_xticks(range(len(numbers[0])), ["none", *aggregation])
    axes.set_yticks(range(len(search)), search)
    shape = f"{result['population']}/{result['set_size']}"
    axes.set(xlabel="aggregation by", ylabel="search by", title=f"correct traces after one step of RSA {shape}")
    return figure


def _parts(config: Config, problems: Sequence[Problem]) -> list[Sequence[Problem]]:
    return [problems[part.start : part.stop] for part in chunks(len(problems), config.evaluate.chunk_problems)]
