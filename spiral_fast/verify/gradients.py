"""Two gradients that should be the same."""

from __future__ import annotations

import torch

from spiral_fast.learner.self_check import LARGEST_DIFFERENCE
from spiral_fast.verify.result import Result, within


def compare(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, note: str) -> Result:
    """|a - b| / |b| of two flat float64 gradients through a model of `dtype`."""
    distance = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()
    return within(distance, LARGEST_DIFFERENCE[dtype], "relative distance {}", note, distance=distance)
