"""The rectangles of a level in one packed call of torch's own flash attention on CUDA.

bfloat16, D a multiple of 8 up to 256. Deterministic only under torch.use_deterministic_algorithms(True), else its
backward adds parts of dq in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.tree_attention.levels import Level


def forward(q: Tensor, k: Tensor, v: Tensor, level: Level, scale: float) -> tuple[Tensor, Tensor]:
    """q (R, Hq, D), k and v (K, Hkv, D). out (R, Hq, D), lse (R, Hq) float32."""
    runs = level.cu_rows, level.cu_keys, level.most_rows, level.most_keys
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *runs, 0.0, level.causal, False, scale=scale)
    return out, lse.T  # it gives (Hq, R)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, level: Level, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the level, given the out and lse of all levels."""
    runs = level.cu_rows, level.cu_keys, level.most_rows, level.most_keys
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of 0
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse.T.contiguous(), *runs, 0.0, level.causal, unused, unused, scale=scale
    )
