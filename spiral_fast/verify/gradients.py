"""How far two right computations of the same gradient may be apart, relative to its norm, by the dtype of the model.

Shapes decide the order of a GEMM's sums. float32: right ones differ by 3e-7 (builtin:parts) and 3e-5 (SmolLM2-135M).
16 bits: each activation is rounded at 4e-3; right ones differ by 0.003 and 0.016. A loss that depends on the split
differs by far more than either.
"""

from __future__ import annotations

import torch

from spiral_fast.verify.result import Result, within

FLOAT32, SIXTEEN_BITS = 1e-3, 0.1


def compare(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, note: str) -> Result:
    """|a - b| / |b| of two flat float64 gradients through a model of `dtype`."""
    distance = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()
    limit = SIXTEEN_BITS if dtype in (torch.bfloat16, torch.float16) else FLOAT32
    return within(distance, limit, "relative distance {}", note, distance=distance)
