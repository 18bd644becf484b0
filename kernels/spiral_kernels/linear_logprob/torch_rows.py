"""Row backend in plain torch operations: any device, float32, bfloat16 and float64."""

from __future__ import annotations

import torch

from spiral_kernels.linear_logprob.tiled import RowSums


def accumulate(logits: torch.Tensor, first: int, targets: torch.Tensor, scale: torch.Tensor, sums: RowSums) -> None:
    logits = logits.to(scale.dtype).mul_(scale[:, None])
    column, inside = true_column(targets, first, logits.shape[1])
    put(logits, column, inside, torch.full_like(scale, -torch.inf))
    before = sums.maximum.clone()
    torch.maximum(before, logits.amax(1), out=sums.maximum)
    origin = torch.where(sums.maximum == -torch.inf, 0, sums.maximum)  # nothing finite yet: the sums are 0
    logits.sub_(origin[:, None])
    shift = before - origin
    factor = shift.exp()
    if sums.weighted is not None:
        e = logits.exp()
        shift = torch.where(factor > 0, shift, 0)
        sums.weighted.add_(shift * sums.sum).mul_(factor).add_(e.mul(logits.clamp_(min=-1e30)).sum(1))
    else:
        e = logits.exp_()
    sums.sum.mul_(factor).add_(e.sum(1))


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
    coefficient = grad * scale
    p = logits.to(scale.dtype).mul_(scale[:, None]).sub_(origin[:, None]).sub_(log_norm[:, None]).exp_()
    d_logits = p.mul_(-coefficient[:, None])
    put(d_logits, *true_column(targets, first, logits.shape[1]), -coefficient * torch.expm1(logp))
    return d_logits.to(dtype)


def true_column(targets: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The true class's column in the tile (C, 1), and whether it lies in the tile (C, 1)."""
    column = (targets - first)[:, None]
    inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), inside


def put(tile: torch.Tensor, column: torch.Tensor, inside: torch.Tensor, values: torch.Tensor) -> None:
    """tile[r, column[r]] = values[r] where inside; no wait for the device."""
    tile.scatter_(1, column, torch.where(inside, values[:, None], tile.gather(1, column)))
