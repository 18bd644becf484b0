"""Row backend in Triton: one kernel, one program a row, over all logits of the row.

It forms the row's sums, or its gradient, or both in one launch. The gradient takes the place of the logits: of float32
logits in their own storage, a bfloat16 one in the front half of each row's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spiral_kernels.linear_logprob.tiles import RowGradient, RowSums, Tile

WHOLE_ROWS = True
BLOCK = 4096  # logits handled at once by a program
WARPS = 8


def accumulate(tile: Tile, sums: RowSums) -> None:
    """`sums` is written, not added to: a tile holds all of its rows' logits."""
    _launch(tile, sums=sums)


def gradient(tile: Tile, of: RowGradient, dtype: torch.dtype) -> Tensor:
    return _launch(tile, dtype, of=of)


def sums_and_gradient(tile: Tile, sums: RowSums, true: Tensor, true_slope: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`accumulate`, and the gradient of each row's log-prob by its products; true: l of the true class (C,)."""
    return _launch(tile, dtype, sums=sums, true=true, true_slope=true_slope)


def _launch(
    tile: Tile,
    dtype: torch.dtype | None = None,
    *,
    sums: RowSums | None = None,
    of: RowGradient | None = None,
    true: Tensor | None = None,
    true_slope: Tensor | None = None,
) -> Tensor:
    rows, columns = tile.logits.shape
    out = tile.logits if dtype is None else tile.logits.view(dtype)[:, :columns]  # a narrower dtype: half of each row
    origin, total, weighted = sums or (of.origin, None, None)
    with torch.cuda.device_of(tile.logits):
        row_kernel[(rows,)](
            tile.logits,
            out,
            tile.bias,
            tile.targets,
            tile.scale,
            origin,
            total,
            weighted,
            true,
            true_slope,
            *((None,) * 5 if of is None else of[1:]),
            columns,
            out.stride(0),
            tile.soft_cap,
            SUMS=sums is not None,
            GRADIENT=dtype is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


@triton.jit
def row_kernel(
    logits_ptr,  # (rows, columns) products h.w
    out_ptr,  # (rows, columns), rows out_stride apart; may begin where logits does
    bias_ptr,  # (columns,) or None
    targets_ptr,  # all others (rows,), or None
    scale_ptr,
    origin_ptr,  # sums over all classes but the true one: written with SUMS; else, of all classes, read
    sum_ptr,
    weighted_ptr,
    true_ptr,  # with SUMS and GRADIENT: l of the true class, the soft cap's derivative there
    true_slope_ptr,
    log_norm_ptr,  # with GRADIENT alone: RowGradient
    grad_ptr,
    of_true_ptr,
    of_entropy_ptr,
    entropy_ptr,
    columns,
    out_stride,
    soft_cap,
    SUMS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    logits_ptr += tl.program_id(0).to(tl.int64) * columns
    out_ptr += tl.program_id(0).to(tl.int64) * out_stride
    target = tl.load(targets_ptr + row)
    scale = tl.load(scale_ptr + row)
    if SUMS:
        origin = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        weighted = tl.zeros((1,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            logit, _ = capped(logits_ptr, bias_ptr, column, inside, soft_cap)
            logit = tl.where(inside & (column != target), logit * scale, float("-inf"))
            origin, total, weighted = online(logit[None, :], origin, total, weighted)
        tl.store(origin_ptr + row, origin)
        tl.store(sum_ptr + row, total)
        if weighted_ptr is not None:
            tl.store(weighted_ptr + row, weighted)
    if GRADIENT:
        if SUMS:
            true = tl.load(true_ptr + row)
            highest = tl.maximum(origin, true)
            others = total * tl.exp(origin - highest)
            norm = others + tl.exp(true - highest)
            origin = highest
            log_norm = tl.log(norm)
            grad = scale
            of_true = scale * others / norm  # 1 - p, with its digits as p -> 1
            if true_slope_ptr is not None:
                of_true *= tl.load(true_slope_ptr + row)
        else:
            origin = tl.load(origin_ptr + row)
            log_norm = tl.load(log_norm_ptr + row)
            grad = tl.load(grad_ptr + row) * scale
            of_true = tl.load(of_true_ptr + row)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            logit, slope = capped(logits_ptr, bias_ptr, column, inside, soft_cap)
            log_p = logit * scale - origin - log_norm
            d = -grad
            if of_entropy_ptr is not None:  # 0 * -1e30, not 0 * -inf
                of_entropy = tl.load(of_entropy_ptr + row) * scale
                d += of_entropy * (tl.maximum(log_p, -1e30) + tl.load(entropy_ptr + row))
            d *= tl.exp(log_p)
            if soft_cap is not None:
                d *= slope
            d = tl.where(column == target, of_true, d)
            tl.debug_barrier()  # the first block is narrower as a gradient, and lies where its own logits did
            tl.store(out_ptr + column, d.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def online(logit, origin, total, weighted):
    """RowSums (R,) with the columns of logit (R, C) added."""
    before = origin
    origin = tl.maximum(before, tl.max(logit, 1))
    measured = tl.where(origin == float("-inf"), 0.0, origin)  # nothing finite yet: the sums are 0
    x = logit - measured[:, None]
    e = tl.exp(x)
    shift = before - measured
    factor = tl.exp(shift)
    shift = tl.where(factor > 0, shift, 0.0)
    weighted = factor * (weighted + shift * total) + tl.sum(e * tl.maximum(x, -1e30), 1)  # 0 * -1e30, not 0 * -inf
    return origin, factor * total + tl.sum(e, 1), weighted


@triton.jit
def capped(logits_ptr, bias_ptr, column, inside, soft_cap):
    """Logits before the temperature, and the soft cap's derivative (meaningless without one)."""
    logit = tl.load(logits_ptr + column, mask=inside, other=0.0)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr + column, mask=inside, other=0.0)
    slope = logit
    if soft_cap is not None:
        value, slope = tanh(logit / soft_cap)
        logit = soft_cap * value
    return logit, slope


@triton.jit
def tanh(x):
    """tanh and its derivative 1 - tanh^2, which keeps its digits where tanh is near 1."""
    a = tl.abs(x)
    z = a * a
    s = 2.0 / (tl.exp(tl.minimum(2.0 * a, 60.0)) + 1.0)
    p = -5.70498872745e-3  # Cephes' polynomial for tanh below 0.625
    p = p * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    small = p * z * a + a
    value = tl.where(a < 0.625, small, 1.0 - s)
    slope = tl.where(a < 0.625, 1.0 - small * small, s * (2.0 - s))
    return tl.where(x < 0, -value, value), slope
