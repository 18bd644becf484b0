"""What each `credit.algorithm` samples and credits, and which rollout shapes it can be run with. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb, perm
from typing import TYPE_CHECKING, Any, Literal

from spiral_fast.level_refusals import level_refusals

if TYPE_CHECKING:
    from spiral_fast.config import Config

Refusal = tuple[str, Any, str]  # key, value, why it cannot be used


@dataclass(frozen=True)
class Algorithm:
    search: Literal["sets", "own"] | None  # what a search trace's credit comes from: scores of its sets, own reward
    aggregates: bool  # whether aggregation traces are sampled
    trains_aggregation: bool
    draws_sets: bool

    @property
    def trains_both(self) -> bool:
        return self.search is not None and self.trains_aggregation


ALGORITHMS = {
    "spiral": Algorithm("sets", aggregates=True, trains_aggregation=True, draws_sets=True),
    "grpo": Algorithm("own", aggregates=False, trains_aggregation=False, draws_sets=False),
    "aggregator_only": Algorithm(None, aggregates=True, trains_aggregation=True, draws_sets=True),
    "search_only": Algorithm("sets", aggregates=True, trains_aggregation=False, draws_sets=True),
    "independent": Algorithm("own", aggregates=True, trains_aggregation=True, draws_sets=True),
    "poly_epo": Algorithm("sets", aggregates=False, trains_aggregation=False, draws_sets=True),
}


def shape_refusals(config: Config) -> Iterator[Refusal]:
    """Shapes that would make a credit identically zero or biased, and options that the algorithm never reads."""
    rollout, credit, name = config.rollout, config.credit, config.credit.algorithm
    algorithm, n1, n2 = ALGORITHMS[name], rollout.n_search, rollout.n_aggregations

    if algorithm.search and n1 < 2:
        yield "rollout.n_search", n1, "with a single search trace every search credit is zero; use at least 2"
    if rollout.levels:
        yield from level_refusals(config)
    elif algorithm.draws_sets:
        yield from _set_refusals(config, algorithm)
    else:
        for key in ("n_sets", "set_size"):
            if getattr(rollout, key):
                yield f"rollout.{key}", getattr(rollout, key), f"{name} draws no sets; set it to 0"
        if rollout.set_sampler != "uniform":
            yield "rollout.set_sampler", rollout.set_sampler, f"{name} draws no sets; remove it"
    if rollout.member_order != "index" and not algorithm.aggregates:
        yield "rollout.member_order", rollout.member_order, f"{name} quotes no traces; remove it"
    if algorithm.trains_aggregation and n2 < 2:
        yield "rollout.n_aggregations", n2, "with fewer than 2 every aggregation credit is zero; use at least 2"
    elif algorithm.aggregates and n2 < 1:
        yield "rollout.n_aggregations", n2, f"{name} scores a set by its aggregations; use at least 1"
    elif not algorithm.aggregates and n2:
        yield "rollout.n_aggregations", n2, f"{name} samples no aggregation; set it to 0"
    if credit.search_weight != 1 and not algorithm.trains_both:
        yield "credit.search_weight", credit.search_weight, f"{name} has no second term to weigh against; remove it"
    for level, trained in (("search", algorithm.search), ("aggregation", algorithm.trains_aggregation)):
        target, limit = getattr(credit, f"{level}_target_length"), getattr(rollout, f"{level}_max_new_tokens")
        if target is not None and not trained:
            yield f"credit.{level}_target_length", target, f"{name} trains no {level}; remove it"
        elif target is not None and target >= limit:
            why = f"the gate never acts at or above rollout.{level}_max_new_tokens ({limit}); lower it or remove it"
            yield f"credit.{level}_target_length", target, why
    if credit.diversity != "distinct_answers" and name != "poly_epo":
        yield "credit.diversity", credit.diversity, f"{name} does not read it, only poly_epo does; remove it"


def _set_refusals(config: Config, algorithm: Algorithm) -> Iterator[Refusal]:
    rollout = config.rollout
    n1, n, k = rollout.n_search, rollout.set_size, rollout.n_sets
    if algorithm.search == "sets":
        fewest, most, why = 2, n1 - 1, "a set of all traces makes every search credit zero"
        too_few = "with fewer than 2 sets every search credit is zero; use at least 2"
    else:
        fewest, most, why = 1, n1, "a set's members are distinct search traces"
        too_few = "without a set there is nothing to aggregate; use at least 1"
    if k < fewest:
        yield "rollout.n_sets", k, too_few
    if not 1 <= n <= most:
        if most:
            yield "rollout.set_size", n, f"allowed: 1 .. {most}; {why}"
    elif k >= fewest:
        possible = perm(n1, n) if rollout.set_sampler == "ordered" else comb(n1, n)
        if k > possible:
            yield "rollout.n_sets", k, f"only {possible} distinct sets of {n} out of {n1} traces exist"
        if possible >= 2**63:
            yield "rollout.set_size", n, f"more than 2^63 sets of {n1} traces; use a smaller one"
        if rollout.set_sampler == "balanced" and (k * n) % n1:
            why = f"needs n_search ({n1}) to divide n_sets * set_size ({k * n})"
            yield "rollout.set_sampler", "balanced", why
    if rollout.member_order == "shared_first" and rollout.set_sampler != "balanced":
        why = (
            f"with set_sampler {rollout.set_sampler} it biases the gradient of an order-sensitive aggregator; "
            "use set_sampler: balanced"
        )
        yield "rollout.member_order", "shared_first", why
