"""The rectangles of a level in one packed call on CUDA: flash-attn 2.7 or later if installed, else torch's own.

bfloat16, D a multiple of 8 up to 256. flash-attn's backward is asked to be deterministic; torch's is only under
torch.use_deterministic_algorithms(True), else it adds parts of dq in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.tree_attention.levels import Level

try:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
except ImportError:
    _flash_attn_varlen_forward = _flash_attn_varlen_backward = None


def forward(q: Tensor, k: Tensor, v: Tensor, level: Level, scale: float) -> tuple[Tensor, Tensor]:
    """q (R, Hq, D), k and v (K, Hkv, D). out (R, Hq, D), lse (R, Hq) float32."""
    runs = level.cu_rows, level.cu_keys, level.most_rows, level.most_keys
    if _flash_attn_varlen_forward is not None:
        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *runs, 0.0, scale, level.causal)
    else:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *runs, 0.0, level.causal, False, scale=scale)
    return out, lse.T  # both give (Hq, R)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, level: Level, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the level, given the out and lse of all levels."""
    runs = level.cu_rows, level.cu_keys, level.most_rows, level.most_keys
    lse = lse.T.contiguous()
    if _flash_attn_varlen_backward is not None:
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        window, softcap, slopes, deterministic = (-1, -1), 0.0, None, True
        _flash_attn_varlen_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            *gradients,
            *runs,
            0.0,
            scale,
            level.causal,
            *window,
            softcap,
            slopes,
            deterministic,
        )
        return gradients
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of 0
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, *runs, 0.0, level.causal, unused, unused, scale=scale
    )
