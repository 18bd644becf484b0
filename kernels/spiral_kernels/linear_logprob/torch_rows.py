"""Row backend in plain torch operations: any device, float32, bfloat16 and float64."""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.linear_logprob.head import cap, cap_slope
from spiral_kernels.linear_logprob.tiles import RowGradient, RowSums, Tile

WHOLE_ROWS = False


def accumulate(tile: Tile, sums: RowSums) -> None:
    _exponentials(tile, sums)


def exponentials(tile: Tile, sums: RowSums) -> Tensor:
    e, slope, factor = _exponentials(tile, sums)
    tile.logits.copy_(e if slope is None else e.mul_(slope))
    return factor


def gradient(tile: Tile, of: RowGradient, dtype: torch.dtype) -> Tensor:
    log_p, slope = _logits(tile)
    log_p.sub_(of.origin[:, None]).sub_(of.log_norm[:, None])
    grad = (of.grad * tile.scale)[:, None]
    if of.of_entropy is None:
        d = log_p.exp_().mul_(-grad)
    else:  # 0 * -1e30, not 0 * -inf
        p = log_p.exp()
        of_entropy = (of.of_entropy * tile.scale)[:, None]
        d = log_p.clamp_(min=-1e30).add_(of.entropy[:, None]).mul_(of_entropy).sub_(grad).mul_(p)
    if slope is not None:
        d.mul_(slope)
    _put(d, *_true_column(tile), of.of_true)
    return d.to(dtype)


def _exponentials(tile: Tile, sums: RowSums) -> tuple[Tensor, Tensor | None, Tensor]:
    """exp(l - origin) (C, B), 0 for the true class, the soft cap's derivative, and the factor of `exponentials`."""
    x, slope = _logits(tile)
    _put(x, *_true_column(tile), torch.full_like(tile.scale, -torch.inf))
    before = sums.origin.clone()
    torch.maximum(before, x.amax(1), out=sums.origin)
    origin = torch.where(sums.origin == -torch.inf, 0, sums.origin)  # nothing finite yet: the sums are 0
    x.sub_(origin[:, None])
    factor = torch.where(before == -torch.inf, 1, (before - origin).exp())
    if sums.weighted is not None:
        e = x.exp()
        shift = torch.where((factor > 0) & (before > -torch.inf), before - origin, 0)
        sums.weighted.add_(shift * sums.sum).mul_(factor).add_(e.mul(x.clamp_(min=-1e30)).sum(1))
    else:
        e = x.exp_()
    sums.sum.mul_(factor).add_(e.sum(1))
    return e, slope, factor


def _logits(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """l (C, B), new, of scale's dtype, and the soft cap's derivative."""
    logits, slope = tile.logits.to(tile.scale.dtype, copy=True), None
    if tile.bias is not None:
        logits += tile.bias
    if tile.soft_cap is not None:
        logits, slope = cap(logits, tile.soft_cap), cap_slope(logits, tile.soft_cap)
    return logits.mul_(tile.scale[:, None]), slope


def _true_column(tile: Tile) -> tuple[Tensor, Tensor]:
    """The true class's column in the tile (C, 1), and whether it lies in the tile (C, 1)."""
    column, width = (tile.targets - tile.first)[:, None], tile.logits.shape[1]
    inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), inside


def _put(values: Tensor, column: Tensor, inside: Tensor, of_true: Tensor) -> None:
    """values[r, column[r]] = of_true[r] where inside; no wait for the device."""
    values.scatter_(1, column, torch.where(inside, of_true[:, None], values.gather(1, column)))
