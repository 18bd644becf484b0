"""Row backend in Triton: CUDA, float32 logits; the gradient is written in the dtype of the GEMMs that follow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spiral_kernels.linear_logprob.tiled import RowSums

BLOCK = 4096  # logits of a row handled at once by a program
WARPS = 8


def accumulate(logits: torch.Tensor, first: int, targets: torch.Tensor, scale: torch.Tensor, sums: RowSums) -> None:
    rows, columns = logits.shape
    with_weighted = sums.weighted is not None
    weighted = sums.weighted if with_weighted else sums.sum  # not touched without
    with torch.cuda.device_of(logits):
        accumulate_kernel[(rows,)](
            logits,
            targets,
            scale,
            sums.maximum,
            sums.sum,
            weighted,
            first,
            columns,
            WEIGHTED=with_weighted,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


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
    rows, columns = logits.shape
    coefficient = grad * scale
    d_true = -coefficient * torch.expm1(logp)
    d_logits = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    with torch.cuda.device_of(logits):
        gradient_kernel[(rows, triton.cdiv(columns, BLOCK))](
            logits,
            d_logits,
            targets,
            scale,
            origin,
            log_norm,
            coefficient,
            d_true,
            first,
            columns,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return d_logits


@triton.jit
def accumulate_kernel(
    logits_ptr,  # (rows, columns)
    targets_ptr,  # all others (rows,)
    scale_ptr,
    maximum_ptr,
    sum_ptr,
    weighted_ptr,
    first,
    columns,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: RowSums over the row's columns but the true one, with a running maximum."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row) - first
    scale = tl.load(scale_ptr + row)
    maximum = tl.load(maximum_ptr + row)
    total = tl.load(sum_ptr + row)
    weighted = tl.load(weighted_ptr + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        wanted = (column < columns) & (column != target)
        logit = tl.load(logits_ptr + row * columns + column, mask=wanted, other=float("-inf")) * scale
        before = maximum
        maximum = tl.maximum(before, tl.max(logit, 0))
        origin = tl.where(maximum == float("-inf"), 0.0, maximum)  # nothing finite yet: the sums are 0
        x = logit - origin
        e = tl.exp(x)
        shift = before - origin
        factor = tl.exp(shift)
        if WEIGHTED:
            shift = tl.where(factor > 0, shift, 0.0)
            weighted = factor * (weighted + shift * total) + tl.sum(e * tl.where(x == float("-inf"), 0.0, x), 0)
        total = factor * total + tl.sum(e, 0)
    tl.store(maximum_ptr + row, maximum)
    tl.store(sum_ptr + row, total)
    if WEIGHTED:
        tl.store(weighted_ptr + row, weighted)


@triton.jit
def gradient_kernel(
    logits_ptr,  # (rows, columns)
    d_logits_ptr,  # (rows, columns), may be logits_ptr
    targets_ptr,  # all others (rows,)
    scale_ptr,
    origin_ptr,
    log_norm_ptr,
    coefficient_ptr,
    d_true_ptr,
    first,
    columns,
    BLOCK: tl.constexpr,
):
    """One block of one row per program: -coefficient * p_v, and d_true in the true class's column."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = tl.load(targets_ptr + row) - first
    logit = tl.load(logits_ptr + row * columns + column, mask=inside, other=0.0)
    x = logit * tl.load(scale_ptr + row) - tl.load(origin_ptr + row) - tl.load(log_norm_ptr + row)
    d_logit = -tl.load(coefficient_ptr + row) * tl.exp(x)
    d_logit = tl.where(column == target, tl.load(d_true_ptr + row), d_logit)
    tl.store(d_logits_ptr + row * columns + column, d_logit.to(d_logits_ptr.dtype.element_ty), mask=inside)
