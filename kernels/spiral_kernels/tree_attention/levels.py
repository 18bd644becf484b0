"""A tree's visible pairs as rectangles of flash attention, in levels of one packed call each.

Level 0: every node on its own rows, causal. Level d + 1: the nodes of depth d that have children, each with its keys
and all rows below it, which see every one of them. The rectangles of a level share neither rows nor keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """S rectangles: the query rows `rows[cu_rows[s] : cu_rows[s + 1]]` with the keys `keys[cu_keys[s] : ...]`."""

    rows: Tensor  # (R,) int64
    keys: Tensor  # (K,) int64
    cu_rows: Tensor  # (S + 1,) int32
    cu_keys: Tensor  # (S + 1,) int32
    most_rows: int  # of one rectangle
    most_keys: int
    causal: bool


class Levels(NamedTuple):
    """What a TreePlan keeps of a list of levels."""

    longest: Tensor  # (L, 2) int64 on the CPU: most_rows, most_keys
    tensors: tuple[Tensor, ...]  # rows, keys, cu_rows, cu_keys of each level, on the plan's device

    def unpack(self) -> list[Level]:
        fields = [self.tensors[i : i + 4] for i in range(0, len(self.tensors), 4)]
        return [
            Level(*tensors, *longest, causal=i == 0)
            for i, (tensors, longest) in enumerate(zip(fields, self.longest.tolist(), strict=True))
        ]


NO_LEVELS = Levels(torch.zeros(0, 2, dtype=torch.int64), ())


def levels_of(start: Tensor, end: Tensor, parent: Tensor, subtree_end: Tensor, device: torch.device) -> Levels:
    """Nodes (M,) int64 on the CPU as in PrefixTree."""
    depth = _depths(parent)
    rectangles = [(start, end, start, end)]
    for d in range(int(depth.max()) + 1 if len(depth) else 0):
        inner = (depth == d) & (subtree_end > end)
        if inner.any():
            rectangles.append((end[inner], subtree_end[inner], start[inner], end[inner]))
    packed = [(*_pack(*rectangle[:2]), *_pack(*rectangle[2:])) for rectangle in rectangles]
    longest = [(most_rows, most_keys) for _, _, most_rows, _, _, most_keys in packed]
    tensors = [x for rows, cu_rows, _, keys, cu_keys, _ in packed for x in (rows, keys, cu_rows, cu_keys)]
    return Levels(torch.tensor(longest), tuple(tensor.to(device) for tensor in tensors))


def _depths(parent: Tensor) -> Tensor:
    depth: list[int] = []
    for above in parent.tolist():
        depth.append(depth[above] + 1 if above >= 0 else 0)
    return torch.tensor(depth, dtype=torch.int64)


def _pack(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor, int]:
    """The numbers of the runs first[s] .. end[s] - 1 in a row, where each run begins in it, the longest's length."""
    length = end - first
    cu = torch.cat([length.new_zeros(1), length.cumsum(0)])
    rows = torch.arange(int(cu[-1])) + torch.repeat_interleave(first - cu[:-1], length)
    return rows, cu.to(torch.int32), int(length.max()) if len(length) else 0
