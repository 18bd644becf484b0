"""Which `rollout.levels` cannot be trained exactly, and what to change. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import comb, perm
from typing import TYPE_CHECKING, Any

from spiral_fast.levels import Level, level_name, levels_of, most_descendants, multipliers, populations

if TYPE_CHECKING:
    from spiral_fast.config import Config

LEAST_M = 0.1  # below it a level's credits hold next to nothing of its gradient


def level_refusals(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Key, value, why it cannot be used; the search credits' own refusals are those of two levels."""
    rollout, credit = config.rollout, config.credit
    if credit.algorithm != "spiral":
        yield "credit.algorithm", credit.algorithm, "only spiral credits rollout.levels; use spiral, or remove levels"
        return
    for name, section, keys in (
        ("rollout", rollout, ("n_sets", "set_size", "n_aggregations", "aggregation_max_new_tokens")),
        ("credit", credit, ("aggregation_target_length",)),
    ):
        for key in keys:
            if (value := getattr(section, key)) != type(section).model_fields[key].default:
                yield f"{name}.{key}", value, "rollout.levels says it for each level; remove it"
    levels = levels_of(config)
    found = list(_shapes(rollout.n_search, levels))
    if rollout.set_sampler == "balanced" and len(levels) > 1:
        why = "with more than one level above search it biases the credits below the top (docs/levels.md); use uniform"
        found.append(("rollout.set_sampler", "balanced", why))
    if rollout.member_order == "shared_first" and (rollout.set_sampler != "balanced" or len(levels) > 1):
        found.append(("rollout.member_order", "shared_first", "needs one level and set_sampler: balanced; remove it"))
    yield from found or _small_multipliers(rollout.n_search, levels)


def _shapes(n_search: int, levels: list[Level]) -> Iterator[tuple[str, Any, str]]:
    for number, (level, population) in enumerate(zip(levels, populations(n_search, levels), strict=False), start=1):
        top, where = number == len(levels), f"level {number}"
        quoted = f"the {population} traces of level {number - 1}"
        if top and level.n_aggregations < 2:
            yield "rollout.levels.n_aggregations", level.n_aggregations, f"{where}: the top needs at least 2"
        if top and level.n_sets < 2:
            yield "rollout.levels.n_sets", level.n_sets, f"{where}: the top needs at least 2 sets of each size"
        if level.target_length is not None and level.target_length >= level.max_new_tokens:
            why = f"{where}: the gate never acts at or above max_new_tokens ({level.max_new_tokens}); lower it"
            yield "rollout.levels.target_length", level.target_length, why
        if len(set(level.set_sizes)) < len(level.set_sizes):
            yield "rollout.levels.set_size", list(level.set_sizes), f"{where}: a size is there twice"
        for size in level.set_sizes:
            most = population - 1 if top else population
            if size > most:
                why = f"{where}: at most {most} of {quoted}" + ("; a set of all tells nothing of any" if top else "")
                yield "rollout.levels.set_size", size, why
                continue
            possible = perm(population, size) if level.sampler == "ordered" else comb(population, size)
            if level.n_sets > possible:
                why = f"{where}: only {possible} distinct sets of {size} out of {quoted} exist"
                yield "rollout.levels.n_sets", level.n_sets, why
            if possible >= 2**63:
                yield "rollout.levels.set_size", size, f"{where}: more than 2^63 sets of {quoted}; use a smaller one"
            if level.sampler == "balanced" and (level.n_sets * size) % population:
                why = f"{where}: each of {quoted} must be in equally many sets, but n_sets * set_size is "
                yield "rollout.levels.n_sets", level.n_sets, why + f"{level.n_sets * size}; use a multiple"


def _small_multipliers(n_search: int, levels: list[Level]) -> Iterator[tuple[str, Any, str]]:
    m, most = multipliers(n_search, levels), most_descendants(n_search, levels)
    quoted, top = populations(n_search, levels)[-2], len(levels)
    for level in range(top):
        if m[level] < LEAST_M:
            why = (
                f"M of {level_name(level)} is {float(m[level]):.3f}, below {LEAST_M}: up to {most[level]} of the "
                f"{quoted} traces that level {top} quotes descend from one of its traces, so nearly every set does; "
                f"use smaller sets in level {top}"
            )
            why += f" or in level {level + 1}" if level < top - 1 else ""
            yield "rollout.levels.set_size", list(levels[-1].set_sizes), why
