"""Torch's flash attention for CPU, which takes a query head per key head: heads are paired here without copies of k, v.

Arithmetic in float32 (float64 for float64) also for bfloat16: torch's bfloat16 kernel is no faster on short blocks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from spiral_kernels.tree_attention.levels import Level
from spiral_kernels.tree_attention.reference import accumulation_dtype


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q (R, Hq, D), k and v (K, Hkv, D), mask (R, K) added to the scores. out (R, Hq, D), lse (R, Hq)."""
    dtype, n_heads, n_key_heads = accumulation_dtype(q.dtype), q.shape[1], k.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _query_heads(q, n_key_heads, dtype),
        _key_heads(k, n_heads, dtype),
        _key_heads(v, n_heads, dtype),
        0.0,
        causal,
        attn_mask=mask,
        scale=scale,
    )
    return _rows(out), lse.flatten(0, 1).T


def attend_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (R, Hq, D), dk and dv (K, Hkv, D) through these keys, where out and lse may be over more keys than these."""
    n_heads, n_key_heads = q.shape[1], k.shape[1]
    d_out, q, out = (_query_heads(x, n_key_heads, lse.dtype) for x in (d_out, q, out))
    k, v = (_key_heads(x, n_heads, lse.dtype) for x in (k, v))
    lse = lse.T.unflatten(0, (n_key_heads, -1)).contiguous()
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return _rows(dq), dk.sum(1).movedim(0, 1), dv.sum(1).movedim(0, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, level: Level, scale: float) -> tuple[Tensor, Tensor]:
    """The rectangles of a level, one after the other."""
    pieces = [attend(q[r], k[c], v[c], scale, causal=level.causal) for r, c in _rectangles(level)]
    out, lse = zip(*pieces, strict=True)
    return torch.cat(out), torch.cat(lse)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, level: Level, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    pieces = [
        attend_backward(d_out[r], q[r], k[c], v[c], out[r], lse[r], scale, causal=level.causal)
        for r, c in _rectangles(level)
    ]
    dq, dk, dv = zip(*pieces, strict=True)
    return torch.cat(dq), torch.cat(dk), torch.cat(dv)


def _rectangles(level: Level) -> list[tuple[slice, slice]]:
    rows, keys = ([slice(*run) for run in pairwise(cu.tolist())] for cu in (level.cu_rows, level.cu_keys))
    return list(zip(rows, keys, strict=True))


def _query_heads(x: Tensor, n_key_heads: int, dtype: torch.dtype) -> Tensor:
    """(R, Hq, D) -> (Hkv, Hq / Hkv, R, D)."""
    return x.to(dtype).movedim(0, 1).unflatten(0, (n_key_heads, -1))


def _key_heads(x: Tensor, n_heads: int, dtype: torch.dtype) -> Tensor:
    """(K, Hkv, D) -> (Hkv, Hq / Hkv, K, D), each key head once in memory."""
    return x.to(dtype).movedim(0, 1)[:, None].expand(-1, n_heads // x.shape[1], -1, -1)


def _rows(x: Tensor) -> Tensor:
    """(Hkv, Hq / Hkv, R, D) -> (R, Hq, D)."""
    return x.flatten(0, 1).movedim(0, 1)
