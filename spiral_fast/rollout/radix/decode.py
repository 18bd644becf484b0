"""Decode: one token of every running request per forward. Which batch holds them, and the runs of tokens they share."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from spiral_fast.path_attention import native_serves
from spiral_fast.rollout.radix.decode_copies import CopiedPrompts
from spiral_fast.rollout.radix.decode_in_place import InPlace, RowByRow
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.rollout.radix.tree import Node


class DecodeBatch(Protocol):
    """Where the running requests' keys and values are; an `Attend` of spiral_fast/attention.py. Rows are 0..R-1."""

    def __len__(self) -> int: ...

    def add(self, prompts: list[Node], members: list[int], limits: np.ndarray) -> None:
        """New rows at the end: for each prompt so many requests; `limits` (rows,): new tokens each may come to need."""

    def remove(self, moves: tuple[np.ndarray, np.ndarray], left: int) -> None:
        """Move rows moves[0] over rows moves[1], then keep the first `left` rows."""

    def begin_step(self) -> None:
        """The next forward brings one token of each row, in row order."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


def decode_batch(pool: Pool, *, batch_invariant: bool = False, windows: bool = False) -> DecodeBatch:
    """In place where the native kernel serves, else in torch with copies; windows: layers have sliding windows."""
    if batch_invariant or windows:
        return RowByRow(pool)
    return InPlace(pool) if native_serves(pool.keys[0]) else CopiedPrompts(pool)
