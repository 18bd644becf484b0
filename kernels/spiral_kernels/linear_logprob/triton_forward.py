"""Row sums of a head without its logits: tiles of hidden states x vocabulary by tensor cores, reduced in registers.

A program takes ROWS rows and one share of the vocabulary, tile by tile; for few rows there are many shares. Their sums
are merged afterwards in a fixed order: two runs are bit-equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spiral_kernels.linear_logprob.head import Head
from spiral_kernels.linear_logprob.tiles import RowSums
from spiral_kernels.linear_logprob.triton_rows import online, tanh

# Rows, vocabulary entries and hidden entries of a tile, warps, stages.
TILES = {torch.bfloat16: (128, 128, 64, 8, 3), torch.float32: (64, 64, 32, 4, 3)}
HOPPER_PROCESSORS = 132
PROGRAMS = 8  # a processor, so that the last ones to finish leave few processors idle


def row_sums(
    hidden: Tensor, head: Head, targets: Tensor, row_index: Tensor | None, scale: Tensor, with_entropy: bool
) -> tuple[RowSums, Tensor]:
    """Sums over all classes but the true one, and the true class's l, each (R,) float32. float32 and bfloat16.

    Products of bfloat16 are summed in float32; float32 ones are formed from three TF32 products each, close to float32.
    """
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, head.weight))
    rows, (vocabulary, size) = len(targets), weight.shape
    tile_rows, columns, depth, warps, stages = TILES[hidden.dtype]
    share = _share(triton.cdiv(rows, tile_rows), triton.cdiv(vocabulary, columns), hidden.device) * columns
    shares = triton.cdiv(vocabulary, share)
    sums = torch.empty(4, shares, rows, dtype=torch.float32, device=hidden.device)
    if rows:
        with torch.cuda.device_of(hidden):
            row_sums_kernel[(triton.cdiv(rows, tile_rows), shares)](
                hidden,
                weight,
                head.bias,
                targets,
                None if row_index is None else row_index.contiguous(),
                scale,
                sums,
                rows,
                vocabulary,
                size,
                share,
                hidden.stride(0),
                weight.stride(0),
                head.soft_cap,
                ROWS=tile_rows,
                COLUMNS=columns,
                DEPTH=depth,
                num_warps=warps,
                num_stages=stages,
            )
    return merge(sums, with_entropy)


def merge(sums: Tensor, with_entropy: bool) -> tuple[RowSums, Tensor]:
    """sums (4, shares, R): origin, sum, weighted, and the true class's l, which is 0 in all shares but its own."""
    origin, total, weighted, true = sums
    highest = origin.amax(0)
    shift = torch.where(origin == -torch.inf, -torch.inf, origin - highest)  # a share may hold nothing finite
    factor = shift.exp()
    if with_entropy:
        weighted = (factor * (weighted + torch.where(factor > 0, shift, 0) * total)).sum(0)
    return RowSums(highest, (factor * total).sum(0), weighted if with_entropy else None), true.sum(0)


def _share(row_tiles: int, vocabulary_tiles: int, device: torch.device) -> int:
    """Vocabulary tiles of a program."""
    processors = HOPPER_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    shares = max(1, PROGRAMS * processors // max(1, row_tiles))
    return triton.cdiv(vocabulary_tiles, min(shares, vocabulary_tiles))


@triton.jit
def row_sums_kernel(
    hidden_ptr,  # (N, size), rows hidden_stride apart
    weight_ptr,  # (vocabulary, size), rows weight_stride apart
    bias_ptr,  # (vocabulary,) or None
    targets_ptr,  # (rows,)
    row_index_ptr,  # (rows,) or None
    scale_ptr,  # (rows,)
    sums_ptr,  # (4, shares, rows)
    rows,
    vocabulary,
    size,
    share,  # vocabulary entries of a program
    hidden_stride,
    weight_stride,
    soft_cap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    source = tl.minimum(row, rows - 1).to(tl.int64)  # rows beyond the last repeat it and are not stored
    target = tl.load(targets_ptr + source)
    scale = tl.load(scale_ptr + source)
    place = source
    if row_index_ptr is not None:
        place = tl.load(row_index_ptr + source)
    k = tl.arange(0, DEPTH)
    h_ptrs = hidden_ptr + place[:, None] * hidden_stride + k[None, :]

    origin = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    true = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, vocabulary), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < vocabulary
        entry = tl.minimum(column, vocabulary - 1).to(tl.int64)
        w_ptrs = weight_ptr + entry[None, :] * weight_stride + k[:, None]
        logit = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, size, DEPTH):
            within = k < size - depth
            h = tl.load(h_ptrs + depth, mask=within[None, :], other=0.0)
            w = tl.load(w_ptrs + depth, mask=within[:, None], other=0.0)
            logit = tl.dot(h, w, logit, input_precision="tf32x3")
        if bias_ptr is not None:
            logit += tl.load(bias_ptr + entry)[None, :]
        if soft_cap is not None:
            logit = soft_cap * tanh(logit / soft_cap)[0]
        logit *= scale[:, None]

        is_true = column[None, :] == target[:, None]
        true += tl.sum(tl.where(is_true, logit, 0.0), 1)
        logit = tl.where(inside[None, :] & ~is_true, logit, float("-inf"))
        origin, total, weighted = online(logit, origin, total, weighted)

    shares = tl.num_programs(1)
    to = sums_ptr + tl.program_id(1).to(tl.int64) * rows + row
    plane = shares.to(tl.int64) * rows
    tl.store(to, origin, mask=here)
    tl.store(to + plane, total, mask=here)
    tl.store(to + 2 * plane, weighted, mask=here)
    tl.store(to + 3 * plane, true, mask=here)
