"""The rectangles of a level in one packed call of the package flash-attn, 2.7 or a later 2.x.

bfloat16, D a multiple of 8 up to 256. Its backward is asked to be deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.tree_attention.levels import Level


def forward(q: Tensor, k: Tensor, v: Tensor, level: Level, scale: float) -> tuple[Tensor, Tensor]:
    """q (R, Hq, D), k and v (K, Hkv, D). out (R, Hq, D), lse (R, Hq) float32."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    runs = level.cu_rows, level.cu_keys, level.most_rows, level.most_keys
    dropout = 0.0
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *runs, dropout, scale, level.causal)
    return out, lse.T  # it gives (Hq, R)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, level: Level, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the level, given the out and lse of all levels."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    runs = level.cu_rows, level.cu_keys, level.most_rows, level.most_keys
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    dropout, window, softcap, slopes, deterministic = 0.0, (-1, -1), 0.0, None, True
    settings = dropout, scale, level.causal, *window, softcap, slopes, deterministic
    _flash_attn_varlen_backward(d_out, q, k, v, out, lse.T.contiguous(), *gradients, *runs, *settings)
    return gradients
