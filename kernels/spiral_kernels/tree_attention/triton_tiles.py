"""Which tiles of queries and keys the Triton kernels visit; formed on the host in numpy, once for all layers and heads.

Rows are depth-first, so the queries that see any key of a tile of keys are one run of rows: from the tile's first row
to the largest visible_until in it. Each of these rows sees a key of the tile; those that see all of them lie in one run
inside it. Both rounded to tiles of queries give spans that leave out exactly the tiles in which nothing is visible. The
kernel of dk and dv walks the spans; forward and dq walk lists, their transpose. A tile is `full` if every pair of its
queries and keys exists and is visible: it needs no mask.

What rounding to tiles costs: for a problem of SPIRAL's shape (prompt 256, 8 search traces of 512..4096, 4 sets of 4
with 4 aggregation traces each; 81,302 rows) the tiles visited hold 1.03 times the visible pairs, and 94 % of those that
forward and dq visit need no mask. Nodes shorter than a tile cost more: 10,000 leaves of 10 rows below a root of 10 make
it 16 times, since a tile of 128 queries then sees 10 of 64 to 128 keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Tiles of (queries, keys). The kernels may handle a tile in equal parts, never a larger one.
LISTED = (128, 64)  # forward, dq: many queries, keys walked
SPANNED = (64, 128)  # dk, dv: many keys, queries walked

# A tile of keys near a root is seen by nearly all rows. Where its work is more than 1 / MOST_SHARES of the whole, it
# is split, so that with a few heads no program outlasts an even share of the multiprocessors (132 on Hopper).
MOST_SHARES = 64
LEAST_SPLIT = 64  # tiles of queries; less is not worth a second pass


class Tiles(NamedTuple):
    """All int32; Q tiles of queries, programs in the order of the first dimension, most work first."""

    queries: Tensor  # (Q, 5): tile, its run of `full`, its run of `masked`
    full: Tensor  # (F,) tiles of keys, all pairs visible
    masked: Tensor  # (M,) tiles of keys, some pairs visible
    keys: Tensor  # (K, 5): tile of keys, first and end of its tiles of queries, of those first and end of the full ones
    parts: Tensor  # (S,) the first S of `keys` are parts of split tiles: number of parts if first of its tile, else 0


class Spans(NamedTuple):
    """For each tile of keys the run of tiles of queries with a visible pair, and inside it the run of full ones."""

    first: np.ndarray
    end: np.ndarray
    full_first: np.ndarray
    full_end: np.ndarray


def plan_tiles(start: Tensor, end: Tensor, parent: Tensor, subtree_end: Tensor) -> Tiles:
    """Tiles of a tree, its nodes (M,) int64 on the CPU as in PrefixTree. `parent` adds nothing to the others."""
    visible_until = np.repeat(subtree_end.numpy(), (end - start).numpy())
    rows = len(visible_until)
    arrays = *_lists(_spans(visible_until, *LISTED), -(-rows // LISTED[0])), *_items(_spans(visible_until, *SPANNED))
    return Tiles(*(torch.from_numpy(array.astype(np.int32)) for array in arrays))


def _spans(visible_until: np.ndarray, block_q: int, block_k: int) -> Spans:
    key = np.arange(0, len(visible_until), block_k)
    if not len(key):
        return Spans(key, key, key, key)
    first = key // block_q
    end = -(-np.maximum.reduceat(visible_until, key) // block_q)
    full_first = np.minimum(-(-(key + block_k - 1) // block_q), end)
    full_end = np.maximum(np.minimum.reduceat(visible_until, key) // block_q, full_first)
    return Spans(first, end, full_first, full_end)


def _lists(spans: Spans, n_queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transpose: (Q, 5), full, masked of Tiles. A band of tiles of queries at a time, against the spans reaching it."""
    full, masked = [], []
    counts = np.zeros((n_queries, 2), np.int64)
    band = 256
    for low in range(0, n_queries, band):
        query = np.arange(low, min(low + band, n_queries))[:, None]
        reached = np.flatnonzero((spans.first <= query[-1]) & (spans.end > low))
        visited = (spans.first[reached] <= query) & (query < spans.end[reached])
        is_full = (spans.full_first[reached] <= query) & (query < spans.full_end[reached])
        for column, (keys, here) in enumerate(((full, is_full), (masked, visited & ~is_full))):
            keys.append(reached[np.nonzero(here)[1]])
            counts[low : low + band, column] = here.sum(1)
    ends = counts.cumsum(0)
    begins = ends - counts
    order = np.argsort(-counts.sum(1), kind="stable")
    queries = np.stack([order, begins[order, 0], ends[order, 0], begins[order, 1], ends[order, 1]], 1)
    return queries, np.concatenate([*full, []]), np.concatenate([*masked, []])


def _items(spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """`keys` and `parts` of Tiles."""
    work = spans.end - spans.first
    limit = max(LEAST_SPLIT, work.sum() // MOST_SHARES)
    n_parts = -(-work // limit)
    tile = np.repeat(np.arange(len(work)), n_parts)
    part = np.arange(len(tile)) - np.repeat(n_parts.cumsum() - n_parts, n_parts)
    first = spans.first[tile] + work[tile] * part // n_parts[tile]
    end = spans.first[tile] + work[tile] * (part + 1) // n_parts[tile]
    full_first, full_end = np.clip(spans.full_first[tile], first, end), np.clip(spans.full_end[tile], first, end)
    is_part = n_parts[tile] > 1
    order = np.lexsort((part, np.where(is_part, tile, -work[tile]), ~is_part))  # parts of a tile stay together
    keys = np.stack([tile, first, end, full_first, full_end], 1)[order]
    parts = np.where(part == 0, n_parts[tile], 0)[order[: is_part.sum()]]
    return keys, parts
