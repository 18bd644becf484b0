"""tree_attention on CPU: for each block of query rows one call of torch's flash attention on the keys that it sees.

Rows are depth-first, so the keys that a block sees are those that its first row sees and the block's own: they are
gathered once, and a mask of (block x keys) hides what some of its rows do not see. One call serves a block of any
number of nodes, so trees of many short nodes cost no more calls. The GEMMs are torch's (MKL, oneDNN), threads over
heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spiral_kernels.tree_attention.flash_cpu import attend, attend_backward
from spiral_kernels.tree_attention.plan import TreePlan
from spiral_kernels.tree_attention.reference import accumulation_dtype

BLOCK = 64  # query rows


def forward(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=dtype)
    for rows, keys, mask in _blocks(plan.visible_until, dtype, q, k, v):
        out[rows], lse[rows] = attend(q[rows], k[keys], v[keys], scale, mask=mask)
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: TreePlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty(q.shape, dtype=q.dtype), *(torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    for rows, keys, mask in _blocks(plan.visible_until, lse.dtype, d_out, q, k, v):
        arguments = d_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale
        dq[rows], dk_block, dv_block = attend_backward(*arguments, mask=mask)
        dk.index_add_(0, keys, dk_block)
        dv.index_add_(0, keys, dv_block)
    return dq, dk, dv


def _blocks(visible_until: Tensor, dtype: torch.dtype, *values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, keys, mask (rows, keys) to add to the scores: 0 or -inf) of each block.

    A hidden pair counts 0 times its values: where these are not all finite, each row is a block, without hidden pairs.
    """
    n_rows = visible_until.shape[0]
    every_row = torch.arange(n_rows)
    block = BLOCK if all(x.isfinite().all() for x in values) else 1
    for first in range(0, n_rows, block):
        rows = slice(first, min(first + block, n_rows))
        keys = torch.cat([(visible_until[:first] > first).nonzero()[:, 0], every_row[rows]])
        row = every_row[rows, None]
        hidden = (keys > row) | (visible_until[keys] <= row)
        yield rows, keys, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
