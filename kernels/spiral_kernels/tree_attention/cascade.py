"""tree_attention as a cascade of flash attention calls, one for each level of the tree (levels.py).

Each call sees a part of a row's keys and gives its out_i and lse_i; merged, lse = log sum exp(lse_i) and
out = sum exp(lse_i - lse) out_i. Given the *merged* out and lse, the backward of flash attention computes
P = exp(S - lse) and dS = P * (dO V^T - rowsum(dO * out)), the true ones for the keys it sees: so its gradients add up.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from spiral_kernels.tree_attention.plan import TreePlan
from spiral_kernels.tree_attention.reference import accumulation_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float, flash: ModuleType | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.py. flash: a module like flash_cpu.py; None = the one of q's device."""
    flash = flash or _flash_of(q)
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for level in plan.levels.unpack():
        rows, keys = level.rows, level.keys
        part, part_lse = flash.forward(q[rows], k[keys], v[keys], level, scale)
        before = lse[rows]
        merged = torch.logaddexp(before, part_lse)
        lse[rows] = merged
        out[rows] = out[rows] * (before - merged).exp()[..., None] + part * (part_lse - merged).exp()[..., None]
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: TreePlan,
    scale: float,
    flash: ModuleType | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    flash = flash or _flash_of(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for level in plan.levels.unpack():
        rows, keys = level.rows, level.keys
        parts = flash.backward(d_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], level, scale)
        for total, where, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            total[where] += part  # no row twice in a level
    return dq, dk, dv


def _flash_of(q: Tensor) -> ModuleType:
    if q.device.type == "cpu":
        from spiral_kernels.tree_attention import flash_cpu

        return flash_cpu
    from spiral_kernels.tree_attention import flash_cuda

    return flash_cuda
