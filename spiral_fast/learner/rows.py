"""Rows of a batch, checked and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One trace as the learner sees it."""

    prompt: list[int]  # token ids, at least one
    tokens: list[int]  # sampled token ids, at least one
    rollout_logp: np.ndarray | None  # (len(tokens),) log-probs under the engine; None where no ratio is needed
    credit: float  # A; a row of credit exactly 0 is not computed
    weight: float  # of each of the row's tokens in the loss, computed from the whole batch
    level: int  # 0 search, 1 aggregation, above it 2, 3, ...

    @property
    def computed_tokens(self) -> int:
        """The last token predicts nothing and is not run."""
        return len(self.prompt) + len(self.tokens) - 1


def check_rows(rows: Sequence[Row], indices: Iterable[int], max_context: int, *, ratio: bool) -> None:
    """Raise ValueError naming the first of rows[indices] that cannot be computed exactly."""
    for index in indices:
        row = rows[index]
        length = len(row.prompt) + len(row.tokens)
        if not row.prompt or not row.tokens:
            raise ValueError(f"row {index}: prompt and tokens must not be empty")
        if length > max_context:
            raise ValueError(f"row {index}: {length} tokens exceed the model's context of {max_context}")
        if ratio and (row.rollout_logp is None or len(row.rollout_logp) != len(row.tokens)):
            raise ValueError(f"row {index}: needs one rollout log-prob for each of its {len(row.tokens)} tokens")


def not_finite(rows: Sequence[Row]) -> list[int]:
    """Indices of the rows with a rollout log-prob that is not finite."""
    return [i for i, row in enumerate(rows) if row.rollout_logp is not None and not np.isfinite(row.rollout_logp).all()]


def micro_batches(rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Indices of the rows, shortest first, cut so that each part computes at most `token_budget` tokens.

    Neighbours are of equal length where the batch allows, which DocumentAttention stacks. A row above the budget is a
    micro-batch of its own.
    """
    parts: list[list[int]] = []
    room = 0
    for index in sorted(range(len(rows)), key=lambda i: (rows[i].computed_tokens, i)):
        need = rows[index].computed_tokens
        if not parts or need > room:
            parts.append([])
            room = token_budget
        parts[-1].append(index)
        room -= need
    return parts
