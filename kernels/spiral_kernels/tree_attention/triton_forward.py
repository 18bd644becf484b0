"""Forward kernel of tree_attention: flash attention over the listed tiles of keys, softmax in base 2.

Shapes: q, out (T, HQ, D), k, v (T, HKV, D), lse (T, HQ), all contiguous. Names: a *tile* is one of triton_tiles.py, a
*block* the equal part of it that a program handles at once. D is padded with zeros to BLOCK_D.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# float32 products: three of tf32 each, about as exact as float32; bfloat16 and float16 ones are exact as they are.
PRECISION = tl.constexpr("tf32x3")


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    visible_until_ptr,  # (T,)
    queries_ptr,  # Tiles.queries, .full, .masked
    full_ptr,
    masked_ptr,
    rows,  # T
    scale_2,  # scale * log2(e)
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One block of queries and one head per program."""
    head = tl.program_id(0)
    item = queries_ptr + tl.program_id(1) // (TILE_Q // BLOCK_Q) * 5
    first_query = tl.load(item) * TILE_Q + tl.program_id(1) % (TILE_Q // BLOCK_Q) * BLOCK_Q
    query = first_query + tl.arange(0, BLOCK_Q)
    q = load_rows(q_ptr + head * D, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D, True, UPCAST)
    k_ptr += head // (HQ // HKV) * D
    v_ptr += head // (HQ // HKV) * D

    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        tiles_ptr = masked_ptr if MASKED else full_ptr
        begin, end = tl.load(item + 1 + 2 * MASKED), tl.load(item + 2 + 2 * MASKED)
        for i in range(begin * (TILE_K // BLOCK_K), end * (TILE_K // BLOCK_K)):
            first_key = listed_block(tiles_ptr, i, TILE_K, BLOCK_K)
            k = load_rows(k_ptr, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D, MASKED, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_2
            if MASKED:
                key = first_key + tl.arange(0, BLOCK_K)
                until = tl.load(visible_until_ptr + key, mask=key < rows, other=0)
                sees = (key[None, :] <= query[:, None]) & (query[:, None] < until[None, :])
                scores = tl.where(sees, scores, float("-inf"))
            before = maximum
            maximum = tl.maximum(before, tl.max(scores, 1))
            # A row that has seen nothing yet has maximum -inf and must get weights 0, not NaN.
            origin = tl.where(maximum == float("-inf"), 0.0, maximum) if MASKED else maximum
            weights = tl.exp2(scores - origin[:, None])
            factor = tl.exp2(before - origin)
            total = total * factor + tl.sum(weights, 1)
            v = load_rows(v_ptr, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D, MASKED, UPCAST)
            weighted = tl.dot(weights.to(v.dtype), v, weighted * factor[:, None], input_precision=PRECISION)

    store_rows(out_ptr + head * D, weighted / total[:, None], first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D)
    tl.store(of_head(lse_ptr + head, first_query, BLOCK_Q, HQ), (maximum + tl.log2(total)) * LN_2, mask=query < rows)


@triton.jit
def listed_block(tiles_ptr, i, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """First row of block i of the listed tiles."""
    return tl.load(tiles_ptr + i // (TILE // BLOCK)) * TILE + i % (TILE // BLOCK) * BLOCK


@triton.jit
def of_head(ptr, first, BLOCK: tl.constexpr, HQ: tl.constexpr):
    """Pointers to a head's numbers in (T, HQ), of BLOCK rows from `first` on."""
    return ptr + tl.cast(first, tl.int64) * HQ + tl.arange(0, BLOCK) * HQ


@triton.jit
def load_rows(
    ptr,
    first,
    rows,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """(BLOCK, BLOCK_D) from row `first` on; 0 past column D and, if MASKED, past the last row."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    block = ptr + tl.cast(first, tl.int64) * STRIDE + (row[:, None] * STRIDE + column[None, :])
    if MASKED:
        values = tl.load(block, mask=(first + row < rows)[:, None] & (column < D)[None, :], other=0.0)
    elif D < BLOCK_D:
        values = tl.load(block, mask=(column < D)[None, :], other=0.0)
    else:
        values = tl.load(block)
    return values.to(tl.float32) if UPCAST else values


@triton.jit
def store_rows(
    ptr,
    values,
    first,
    rows,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    block = ptr + tl.cast(first, tl.int64) * STRIDE + (row[:, None] * STRIDE + column[None, :])
    tl.store(block, values.to(ptr.dtype.element_ty), mask=(first + row < rows)[:, None] & (column < D)[None, :])
