"""Backward kernels of tree_attention, without atomics: dq by blocks of queries, dk and dv by blocks of keys.

    P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - delta), delta = rowsum(dO * O), dQ = scale dS K, dK = scale dS^T Q

Shapes and names as in triton_forward.py. The kernel of dq runs first and leaves delta and lse * log2(e) for the other,
float32 of shape (HQ, PADDED): rows of a head side by side, up to the end of the last tile of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spiral_kernels.tree_attention.triton_forward import LOG2_E, PRECISION, listed_block, load_rows, of_head, store_rows


@triton.jit(do_not_specialize=["rows"])
def d_query_kernel(
    d_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    lse_2_ptr,
    delta_ptr,
    dq_ptr,
    visible_until_ptr,  # (T,)
    queries_ptr,  # Tiles.queries, .full, .masked
    full_ptr,
    masked_ptr,
    rows,  # T
    padded,
    scale,
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
    """One block of queries and one head per program; walks the keys as the forward does."""
    head = tl.program_id(0)
    item = queries_ptr + tl.program_id(1) // (TILE_Q // BLOCK_Q) * 5
    first_query = tl.load(item) * TILE_Q + tl.program_id(1) % (TILE_Q // BLOCK_Q) * BLOCK_Q
    query = first_query + tl.arange(0, BLOCK_Q)
    d_out = load_rows(d_out_ptr + head * D, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D, True, UPCAST)
    out = load_rows(out_ptr + head * D, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D, True, UPCAST)
    delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * padded + query, delta)
    q = load_rows(q_ptr + head * D, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D, True, UPCAST)
    lse_2 = tl.load(of_head(lse_ptr + head, first_query, BLOCK_Q, HQ), mask=query < rows, other=0.0) * LOG2_E
    tl.store(lse_2_ptr + head * padded + query, lse_2)
    k_ptr += head // (HQ // HKV) * D
    v_ptr += head // (HQ // HKV) * D

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        tiles_ptr = masked_ptr if MASKED else full_ptr
        begin, end = tl.load(item + 1 + 2 * MASKED), tl.load(item + 2 + 2 * MASKED)
        for i in range(begin * (TILE_K // BLOCK_K), end * (TILE_K // BLOCK_K)):
            first_key = listed_block(tiles_ptr, i, TILE_K, BLOCK_K)
            k = load_rows(k_ptr, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D, MASKED, UPCAST)
            v = load_rows(v_ptr, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D, MASKED, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
            if MASKED:
                key = first_key + tl.arange(0, BLOCK_K)
                until = tl.load(visible_until_ptr + key, mask=key < rows, other=0)
                sees = (key[None, :] <= query[:, None]) & (query[:, None] < until[None, :])
                scores = tl.where(sees, scores, float("-inf"))
            probability = tl.exp2(scores - lse_2[:, None])
            d_probability = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
            d_scores = probability * (d_probability - delta[:, None])
            dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)

    store_rows(dq_ptr + head * D, dq * scale, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D)


@triton.jit(do_not_specialize=["rows", "n_parts"])
def d_key_kernel(
    d_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    part_dk_ptr,  # (n_parts, TILE_K, HKV, D) float32: of tiles that are split
    part_dv_ptr,
    visible_until_ptr,  # (T,)
    keys_ptr,  # Tiles.keys
    rows,  # T
    padded,
    n_parts,
    scale,
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
    """One block of keys and one key head per program; walks the queries that see it, of all heads of the group."""
    kv_head = tl.program_id(0)
    number = tl.program_id(1) // (TILE_K // BLOCK_K)
    first_row = tl.program_id(1) % (TILE_K // BLOCK_K) * BLOCK_K  # in the tile
    item = keys_ptr + number * 5
    first_key = tl.load(item) * TILE_K + first_row
    k = load_rows(k_ptr + kv_head * D, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D, True, UPCAST)
    v = load_rows(v_ptr + kv_head * D, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D, True, UPCAST)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    STEPS: tl.constexpr = TILE_Q // BLOCK_Q * (HQ // HKV)  # a tile of queries: its blocks, the heads of each in turn
    for MASKED in tl.static_range(2):
        full_first, full_end = tl.load(item + 3), tl.load(item + 4)
        n_tiles = full_end - full_first
        if MASKED:
            first = tl.load(item + 1)
            n_tiles = tl.load(item + 2) - first - n_tiles
            key = first_key + tl.arange(0, BLOCK_K)
            until = tl.load(visible_until_ptr + key, mask=key < rows, other=0)
        # Registers are short: without masks the next block is loaded ahead, with them (few tiles) it is waited for, and
        # neither loop keeps what it can compute again.
        for i in tl.range(n_tiles * STEPS, num_stages=1 if MASKED else None, disable_licm=True):
            tile = i // STEPS
            if MASKED:  # the tiles before the full ones, then those after
                tile += first
                tile += tl.where(tile >= full_first, full_end - full_first, 0)
            else:
                tile += full_first
            head = kv_head * (HQ // HKV) + i % (HQ // HKV)
            first_query = tile * TILE_Q + i % STEPS // (HQ // HKV) * BLOCK_Q
            query = first_query + tl.arange(0, BLOCK_Q)
            of_head = head * padded + query
            q = load_rows(q_ptr + head * D, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D, MASKED, UPCAST)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (keys, queries)
            if MASKED:
                sees = (key[:, None] <= query[None, :]) & (query[None, :] < until[:, None])
                scores = tl.where(sees, scores, float("-inf"))
            probability = tl.exp2(scores * (scale * LOG2_E) - tl.load(lse_2_ptr + of_head)[None, :])
            d_out = load_rows(d_out_ptr + head * D, first_query, rows, BLOCK_Q, HQ * D, D, BLOCK_D, MASKED, UPCAST)
            d_probability = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
            d_scores = probability * (d_probability - tl.load(delta_ptr + of_head)[None, :])
            dv = tl.dot(probability.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
            dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)

    dk *= scale
    if number < n_parts:
        row = number * TILE_K + first_row
        end_row = row + BLOCK_K
        store_rows(part_dk_ptr + kv_head * D, dk, row, end_row, BLOCK_K, HKV * D, D, BLOCK_D)
        store_rows(part_dv_ptr + kv_head * D, dv, row, end_row, BLOCK_K, HKV * D, D, BLOCK_D)
    else:
        store_rows(dk_ptr + kv_head * D, dk, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D)
        store_rows(dv_ptr + kv_head * D, dv, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D)


@triton.jit(do_not_specialize=["rows"])
def sum_parts_kernel(
    part_ptr,  # (n_parts, TILE_K, HKV, D) float32
    sum_ptr,  # (T, HKV, D)
    keys_ptr,  # Tiles.keys
    parts_ptr,  # Tiles.parts
    rows,  # T
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of keys of a split tile and one head per program: the sum of the tile's parts, in their order."""
    part = tl.program_id(1) // (TILE_K // BLOCK_K)
    first_row = tl.program_id(1) % (TILE_K // BLOCK_K) * BLOCK_K
    part_ptr += tl.program_id(0) * D
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    n_parts = tl.load(parts_ptr + part)
    for i in range(part, part + n_parts):
        total += load_rows(part_ptr, i * TILE_K + first_row, 0, BLOCK_K, HKV * D, D, BLOCK_D, False, False)
    first_key = tl.load(keys_ptr + part * 5) * TILE_K + first_row
    rows = tl.where(n_parts > 0, rows, 0)
    store_rows(sum_ptr + tl.program_id(0) * D, total, first_key, rows, BLOCK_K, HKV * D, D, BLOCK_D)
