"""tree_attention in Triton: CUDA; float32, bfloat16 and float16, D up to 256 (padded to a power of 2, at least 16).

float32 products are three tf32 ones each. Made for D up to 128: above, the kernel of dk and dv keeps some registers in
memory (bfloat16: about 200 bytes a thread), and float32 is slow.

Under TRITON_INTERPRET=1 it runs on the CPU. There bfloat16 inputs are turned to float32 first, since the interpreter's
products of bfloat16 are wrong.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from spiral_kernels.dispatch import BackendError
from spiral_kernels.tree_attention.plan import TreePlan
from spiral_kernels.tree_attention.triton_backward import d_key_kernel, d_query_kernel, sum_parts_kernel
from spiral_kernels.tree_attention.triton_forward import LOG2_E, forward_kernel
from spiral_kernels.tree_attention.triton_tiles import LISTED, SPANNED, Tiles


class Blocks(NamedTuple):
    """What a program handles at once, and how; chosen by registers, spills and shared memory of the sm_90 code."""

    queries: int
    keys: int
    warps: int
    stages: int


class Choice(NamedTuple):
    forward: Blocks
    d_query: Blocks
    d_key: Blocks


# by (bytes of an element, D padded)
CHOICES = {
    (2, 64): Choice(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3)),
    (2, 128): Choice(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2)),
    (2, 256): Choice(Blocks(128, 32, 8, 3), Blocks(128, 32, 8, 2), Blocks(32, 64, 8, 2)),
    (4, 64): Choice(Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 2), Blocks(32, 128, 8, 2)),
    (4, 128): Choice(Blocks(16, 64, 8, 2), Blocks(16, 32, 4, 2), Blocks(32, 16, 8, 1)),
    (4, 256): Choice(Blocks(32, 16, 8, 2), Blocks(32, 16, 8, 1), Blocks(16, 32, 8, 1)),
}


def forward(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    """As reference.py: out (T, Hq, D) of q's dtype, lse (T, Hq) float32."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    tiles, choice = Tiles(*plan.tiles), _choice(q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    with torch.cuda.device_of(q):
        forward_kernel[_grid(q, tiles.queries, LISTED[0], choice.forward.queries)](
            q,
            k,
            v,
            out,
            lse,
            plan.visible_until,
            tiles.queries,
            tiles.full,
            tiles.masked,
            len(q),
            scale * LOG2_E.value,
            **_constants(q, k, LISTED, choice.forward),
        )
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: TreePlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.py: dq, dk, dv of the shapes and dtype of q, k, v. Extra memory: delta, and parts of few tiles."""
    tiles, choice = Tiles(*plan.tiles), _choice(q)
    padded = len(tiles.queries) * LISTED[0]
    if q.shape[1] * padded >= 2**31:
        found = f"{len(q)} x {q.shape[1]}"
        raise BackendError(f"tree_attention: backend 'triton' numbers rows x heads in 32 bits, got {found}")
    d_out, q, k, v, out, lse = (x.contiguous() for x in (d_out, q, k, v, out, lse))
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    lse_2, delta = (lse.new_empty((q.shape[1], padded)) for _ in range(2))
    n_parts = len(tiles.parts)
    part_dk, part_dv = (k.new_empty((n_parts, SPANNED[1], *k.shape[1:]), dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(q):
        d_query_kernel[_grid(q, tiles.queries, LISTED[0], choice.d_query.queries)](
            d_out,
            q,
            k,
            v,
            out,
            lse,
            lse_2,
            delta,
            dq,
            plan.visible_until,
            tiles.queries,
            tiles.full,
            tiles.masked,
            len(q),
            padded,
            scale,
            **_constants(q, k, LISTED, choice.d_query),
        )
        d_key_kernel[_grid(k, tiles.keys, SPANNED[1], choice.d_key.keys)](
            d_out,
            q,
            k,
            v,
            lse_2,
            delta,
            dk,
            dv,
            part_dk,
            part_dv,
            plan.visible_until,
            tiles.keys,
            len(q),
            padded,
            n_parts,
            scale,
            **_constants(q, k, SPANNED, choice.d_key),
        )
        if n_parts:
            for part, whole in ((part_dk, dk), (part_dv, dv)):
                sum_parts_kernel[_grid(k, tiles.parts, SPANNED[1], 32)](
                    part,
                    whole,
                    tiles.keys,
                    tiles.parts,
                    len(q),
                    HKV=k.shape[1],
                    D=k.shape[2],
                    BLOCK_D=_padded(k),
                    TILE_K=SPANNED[1],
                    BLOCK_K=32,
                )
    return dq, dk, dv


def _grid(x: Tensor, items: Tensor, tile: int, block: int) -> tuple[int, int]:
    """Heads first, so that those which read the same keys run side by side; then the blocks of the items."""
    return x.shape[1], len(items) * (tile // block)


def _constants(q: Tensor, k: Tensor, tile: tuple[int, int], blocks: Blocks) -> dict:
    return dict(
        HQ=q.shape[1],
        HKV=k.shape[1],
        D=q.shape[2],
        BLOCK_D=_padded(q),
        TILE_Q=tile[0],
        TILE_K=tile[1],
        BLOCK_Q=blocks.queries,
        BLOCK_K=blocks.keys,
        UPCAST=q.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1",
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _padded(x: Tensor) -> int:
    return max(16, triton.next_power_of_2(x.shape[2]))


def _choice(q: Tensor) -> Choice:
    return CHOICES[q.element_size(), max(64, _padded(q))]
