"""Packed forward over prefix trees: a token that several documents have after the same prefix is run once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spiral_fast.learner.packed import Packed
from spiral_fast.learner.rows import Row
from spiral_fast.learner.sharing import Paths, tree_of
from spiral_kernels import PrefixTree, TreePlan, tree_attention


class TreeAttention:
    """Each row of the tree attends to its own path from the root (an `Attend` of spiral_fast/attention.py)."""

    def __init__(self, tree: PrefixTree, device: torch.device | str):
        self.plan = TreePlan.of(tree, device)

    def nodes(self) -> list[tuple[int, int, int]]:
        """See spiral_fast/batch_invariant.py."""
        return list(zip(*(array.tolist() for array in self.plan[:3]), strict=True))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query (1, Hq, T, D), key and value (1, Hkv, T, D); returns (1, T, Hq, D)."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return tree_attention(q, k, v, self.plan, scale=scale).unsqueeze(0)


def pack_tree(
    rows: Sequence[Row],
    paths: Paths,
    part: Sequence[int],
    device: torch.device | str = "cpu",
    role: str | None = None,
) -> Packed:
    """The rows in `part` as one forest; targets, row_index and counts in the order of `part`."""
    tree = tree_of(paths, part)
    batch = [rows[i] for i in part]
    path_rows = tree.trace_rows.split(tree.trace_offsets.diff().tolist())
    row_index = torch.cat([path[len(row.prompt) - 1 :] for row, path in zip(batch, path_rows, strict=True)])
    return Packed(
        tokens=tree.tokens.unsqueeze(0).to(device),
        positions=tree.positions.unsqueeze(0).to(device),
        attend=TreeAttention(tree, device),
        targets=torch.from_numpy(np.concatenate([row.tokens for row in batch])).to(device),
        row_index=row_index.to(device),
        counts=[len(row.tokens) for row in batch],
        role=role,
    )
