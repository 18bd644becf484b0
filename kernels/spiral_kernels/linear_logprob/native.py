"""Row backend in C++ (csrc/row_kernels.cpp): CPU, float32 and bfloat16, torch's number of threads over the rows."""

from __future__ import annotations

import torch

from spiral_kernels import _native
from spiral_kernels.linear_logprob.tiled import RowSums


def accumulate(logits: torch.Tensor, first: int, targets: torch.Tensor, scale: torch.Tensor, sums: RowSums) -> None:
    weighted = torch.zeros_like(sums.sum) if sums.weighted is None else sums.weighted
    _native.accumulate(logits, first, targets, scale, sums.maximum, sums.sum, weighted, torch.get_num_threads())


def gradient(
    logits: torch.Tensor,
    first: int,
    targets: torch.Tensor,
    scale: torch.Tensor,
    origin: torch.Tensor,
    log_norm: torch.Tensor,
    logp: torch.Tensor,
    grad: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    _native.gradient(logits, first, targets, scale, origin, log_norm, logp, grad, torch.get_num_threads())
    return logits
