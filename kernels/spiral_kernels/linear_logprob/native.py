"""Row backend in C++ (csrc/row_kernels.cpp): CPU, float32 and bfloat16, torch's number of threads over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels import _native
from spiral_kernels.linear_logprob.tiles import RowGradient, RowSums, Tile

WHOLE_ROWS = False


def accumulate(tile: Tile, sums: RowSums) -> None:
    _accumulate(tile, sums, None)


def exponentials(tile: Tile, sums: RowSums) -> Tensor:
    factor = torch.empty_like(sums.origin)
    _accumulate(tile, sums, factor)
    return factor


def gradient(tile: Tile, of: RowGradient, dtype: torch.dtype) -> Tensor:
    _native.gradient(*tile[:5], tile.soft_cap or 0.0, *of, torch.get_num_threads())
    return tile.logits


def _accumulate(tile: Tile, sums: RowSums, factor: Tensor | None) -> None:
    weighted = torch.zeros_like(sums.sum) if sums.weighted is None else sums.weighted
    *of_tile, soft_cap = tile
    _native.accumulate(*of_tile, soft_cap or 0.0, sums.origin, sums.sum, weighted, factor, torch.get_num_threads())
