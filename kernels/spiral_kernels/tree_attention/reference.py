"""tree_attention in plain torch with a dense mask: the truth. T x T scores per head; any floating dtype.

Softmax and sums in float32 (float64 for float64), whatever the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.tree_attention.plan import TreePlan


def forward(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    """q (T, Hq, D), k and v (T, Hkv, D). out (T, Hq, D) as q; lse (T, Hq), natural log, float32 or float64."""
    q, k, v = (_heads(x, q.shape[1], accumulation_dtype(q.dtype)) for x in (q, k, v))
    sees = _sees(plan)
    scores = (q @ k.mT * scale).masked_fill(~sees, float("-inf"))
    lse = scores.logsumexp(-1)
    out = _product(torch.exp(scores - lse[..., None]), v, sees)
    return out.movedim(0, 1), lse.movedim(0, 1)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: TreePlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the shapes of q, k, v; a key head's gradient is the sum over the query heads that read it.

    P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q.
    """
    n_heads, n_key_heads = q.shape[1], k.shape[1]
    d_out, q, k, v, out = (_heads(x, n_heads, lse.dtype) for x in (d_out, q, k, v, out))
    sees = _sees(plan)
    probability = torch.exp(q @ k.mT * scale - lse.movedim(0, 1)[..., None]).masked_fill(~sees, 0)
    d_scores = probability * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * scale
    d_scores = d_scores.masked_fill(~sees, 0)
    dq, dk, dv = (
        _product(d_scores, k, sees),
        _product(d_scores.mT, q, sees.mT),
        _product(probability.mT, d_out, sees.mT),
    )
    dk, dv = (x.unflatten(0, (n_key_heads, -1)).sum(1) for x in (dk, dv))
    return dq.movedim(0, 1), dk.movedim(0, 1), dv.movedim(0, 1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads(x: Tensor, n_heads: int, dtype: torch.dtype) -> Tensor:
    """(T, H, D) -> (n_heads, T, D): query head h reads key head h // (Hq / Hkv)."""
    return x.movedim(1, 0).to(dtype).repeat_interleave(n_heads // x.shape[1], 0)


def _sees(plan: TreePlan) -> Tensor:
    """(T, T) bool: which keys each query sees."""
    row = torch.arange(len(plan.visible_until), device=plan.visible_until.device)
    return (row <= row[:, None]) & (row[:, None] < plan.visible_until)


def _product(weights: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """weights (H, M, K) @ values (H, K, N), where a pair that does not count adds nothing, not 0 times inf or nan."""
    finite = values.isfinite().all(-1).all(0)
    result = weights @ values.masked_fill(~finite[:, None], 0)
    for row in (~finite).nonzero()[:, 0].tolist():
        result = result + torch.where(counts[:, row, None], weights[:, :, row, None] * values[:, None, row], 0)
    return result
