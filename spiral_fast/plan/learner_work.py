"""Tokens and FLOPs of a learner step: every trace alone, and with prefixes shared, by the learner's own code."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spiral_fast.config import Config
from spiral_fast.learner.cost import Cost
from spiral_fast.learner.packed import Packed
from spiral_fast.learner.rows import Row, micro_batches
from spiral_fast.learner.sharing import cut, paths_of, tree_of
from spiral_fast.loss_rows import loss_rows
from spiral_fast.trace import SEARCH, ProblemRollout


@dataclass(frozen=True)
class Work:
    tokens: float  # computed in a step
    rows: float  # sampled tokens among them
    flops: float  # as learner/cost.py counts
    recomputed: float  # FLOPs of the forward that checkpointing runs again
    largest: tuple[int, int]  # tokens and sampled tokens of the largest micro-batch
    micro_batches: float

    def times(self, factor: float) -> Work:
        numbers = (self.tokens, self.rows, self.flops, self.recomputed)
        return Work(*(factor * x for x in numbers), self.largest, factor * self.micro_batches)


def learner_work(live: list[ProblemRollout], config: Config, cost: Cost) -> dict[str, Work]:
    """Of a step over these problems: `flat`, `set`, `tree` with every trace, `pruned` as it is run: dead ones left out,
    sharing as learner.sharing says."""
    rows = loss_rows(live, config)
    alive = [row for row in rows if row.credit * row.weight != 0.0]
    budget = config.learner.micro_batch_tokens
    of = {"flat": (rows, "none"), "set": (rows, "set"), "tree": (rows, "tree")}
    of["pruned"] = alive, config.learner.sharing
    return {name: work_of(some, sharing, budget, cost) for name, (some, sharing) in of.items()}


def work_of(rows: list[Row], sharing: str, budget: int, cost: Cost) -> Work:
    """The learner runs search and aggregation rows apart."""
    packed: list[Packed] = []
    levels = [row.level == SEARCH for row in rows]
    for search in (True, False):
        some = [row for row, level in zip(rows, levels, strict=True) if level == search]
        if some:
            packed += _packed(some, sharing, budget, cost)
    if not packed:
        return Work(0, 0, 0.0, 0.0, (0, 0), 0)
    sizes = [(one.tokens.numel(), one.targets.numel()) for one in packed]
    recomputed = sum(_forward_of_layers(cost, one) for one in packed)
    return Work(
        sum(tokens for tokens, _ in sizes),
        sum(sampled for _, sampled in sizes),
        sum(cost.of_packed(one) for one in packed),
        recomputed,
        max(sizes),
        len(packed),
    )


def _packed(rows: list[Row], sharing: str, budget: int, cost: Cost) -> list[Packed]:
    """What a micro-batch computes, for counting: token ids and targets are left out."""
    if sharing == "none":
        parts = [[rows[i] for i in part] for part in micro_batches(rows, budget)]
        positions = [torch.cat([torch.arange(row.computed_tokens) for row in part]) for part in parts]
    else:
        paths = paths_of(rows, sharing)
        indices = [part.rows for part in cut(rows, paths, budget, cost)]
        parts = [[rows[i] for i in part] for part in indices]
        positions = [tree_of(paths, part).positions for part in indices]
    return [
        Packed(of, of, None, torch.empty(sum(len(row.tokens) for row in part)), None, [])
        for part, of in zip(parts, positions, strict=True)
    ]


def _forward_of_layers(cost: Cost, packed: Packed) -> float:
    """Without the head. Of a frozen product's two GEMMs one is the forward, of attention's six two; the adapter's are
    a hundredth of the layers' and counted as frozen."""
    whole = cost.of_packed(packed) - cost.per_row * packed.targets.numel()
    layers = cost.per_token * packed.tokens.numel()
    return layers / 2 + (whole - layers) / 3
