"""Which tokens of a batch are computed once for several rows, and how the rows are cut into micro-batches.

`learner.sharing`: tree = every token after the same prefix (one forest over the batch); set = the prompt of rows with
the same prompt, that is a problem's search traces, a set's aggregation traces; none = every row alone. The gradient is
the same; only what is computed twice differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from spiral_fast.learner.cost import Cost
from spiral_fast.learner.rows import Row, micro_batches
from spiral_fast.lists import Lists
from spiral_kernels import PrefixTree
from spiral_kernels.tree_logprobs import MIN_SHARED_RUN


class Part(NamedTuple):
    """A micro-batch."""

    rows: list[int]  # indices into the rows that were cut
    flops: float


class Paths(NamedTuple):
    """The computed tokens of each row, its last one left out: it predicts nothing."""

    ids: list[np.ndarray]  # of row i (L_i,) int64: equal ids are one token after one prefix, computed once
    token_of: np.ndarray  # (number of ids,) int64: the token with that id


def paths_of(rows: Sequence[Row], sharing: str) -> Paths:
    """Of at least one row. Ids are depth-first: in the order of their last ids, each row shares most with the one
    before it."""
    documents = [np.asarray(row.prompt + row.tokens[:-1], np.int64) for row in rows]
    tokens, offsets = Lists.of(documents)
    names = tokens  # what must agree to be shared: the tokens, or names that keep apart what is not to be shared
    if sharing != "tree":
        names = np.arange(len(tokens))
    if sharing == "set":
        first: dict[bytes, int] = {}
        for row, document, begin in zip(rows, documents, offsets[:-1], strict=True):
            n_prompt = len(row.prompt)
            begin_of_first = first.setdefault(document[:n_prompt].tobytes(), begin)
            names[begin : begin + n_prompt] = names[begin_of_first : begin_of_first + n_prompt]
    run = MIN_SHARED_RUN if sharing == "tree" else 1
    tree = PrefixTree.build(names, offsets, np.zeros(len(names), bool), min_shared_run=run)
    ids = tree.trace_rows.numpy()
    token_of = np.empty(tree.computed_tokens, np.int64)
    token_of[ids] = tokens
    return Paths(np.split(ids, offsets[1:-1]), token_of)


def tree_of(paths: Paths, part: Sequence[int]) -> PrefixTree:
    """The prefix tree of the rows in `part`, with exactly the sharing of `paths`; trace i is row part[i]."""
    ids, offsets = Lists.of([paths.ids[i] for i in part])
    tree = PrefixTree.build(ids, offsets, np.zeros(len(ids), bool))
    return tree._replace(tokens=tree.tokens.new_tensor(paths.token_of[tree.tokens.numpy()]))


def cut(rows: Sequence[Row], paths: Paths, token_budget: int, cost: Cost, *, times: int = 1) -> list[Part]:
    """The rows (at least one) in parts, depth-first, each of at most `token_budget` computed tokens; a longer row is a
    part of its own.

    Of all cuts of that order: the one that computes the fewest tokens, then of the fewest parts, then of the most even
    FLOPs; after it `split` to a multiple of `times` parts.
    """
    order = sorted(range(len(rows)), key=lambda i: (paths.ids[i][-1], i))
    length, sampled = (np.array([len(x[i]) for i in order]) for x in (paths.ids, [row.tokens for row in rows]))
    shared = np.array([0] + [_agreeing(paths.ids[a], paths.ids[b]) for a, b in pairwise(order)])
    of_shared = cost.flops(shared, _pairs(shared), 0)
    # A part order[i:j] computes what its rows add to the row before each, and what its first shares with order[i - 1].
    added = _sums(length - shared)
    flops = _sums(cost.flops(length, _pairs(length), sampled) - of_shared)
    # Of the best cut of the first j rows: tokens computed twice, parts, sum of squared FLOPs; where its
    # last part begins.
    repeated, parts, last = (np.zeros(len(order) + 1, np.int64) for _ in range(3))
    squares = np.zeros(len(order) + 1)
    for j in range(1, len(order) + 1):
        i = np.arange(min(np.searchsorted(added, added[j] - token_budget), j - 1), j)
        best = (added[j] - added[i] + shared[i] <= token_budget) | (i == j - 1)
        for of, values in (
            (repeated, repeated[i] + shared[i]),
            (parts, parts[i] + 1),
            (squares, squares[i] + (flops[j] - flops[i] + of_shared[i]) ** 2),
        ):
            of[j] = values[best].min()
            best &= values == of[j]
        last[j] = i[best.argmax()]
    ends = [len(order)]
    while ends[-1]:
        ends.append(last[ends[-1]])

    def flops_of(begin, end):
        return flops[end] - flops[begin] + of_shared[begin]

    ends = split(ends[::-1], flops_of, times)
    return [Part(order[begin:end], float(flops_of(begin, end))) for begin, end in pairwise(ends)]


def cut_flat(rows: Sequence[Row], token_budget: int, cost: Cost, *, times: int = 1) -> list[Part]:
    """The rows as `micro_batches` cuts them, nothing shared, then `split` to a multiple of `times` parts."""
    parts = micro_batches(rows, token_budget)
    order = [i for part in parts for i in part]
    flops = _sums(np.array([cost.of_row(rows[i]) for i in order]))

    def flops_of(begin, end):
        return flops[end] - flops[begin]

    ends = split(_sums(np.array([len(part) for part in parts])).tolist(), flops_of, times)
    return [Part(order[begin:end], float(flops_of(begin, end))) for begin, end in pairwise(ends)]


def split(ends: list[int], flops_of: Callable, times: int) -> list[int]:
    """`ends` (0, then where each part of a list ends) with more ends between them, until the parts are a multiple of
    `times` or single items: again and again the part of the most FLOPs is cut where its larger half is smallest.
    flops_of(begin, end) also takes arrays. What is shared across a new end is computed on both sides of it."""
    ends = list(ends)
    while (len(ends) - 1) % times:
        wide = [i for i in range(len(ends) - 1) if ends[i + 1] - ends[i] > 1]
        if not wide:
            break
        at = max(wide, key=lambda i: flops_of(ends[i], ends[i + 1]))
        inner = np.arange(ends[at] + 1, ends[at + 1])
        larger = np.maximum(flops_of(ends[at], inner), flops_of(inner, ends[at + 1]))
        ends.insert(at + 1, int(inner[larger.argmin()]))
    return ends


def _agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries agree."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _pairs(length: np.ndarray) -> np.ndarray:
    """(query, key) pairs of causal attention over so many tokens."""
    return length * (length + 1) // 2


def _sums(values: np.ndarray) -> np.ndarray:
    """The sums of the first 0, 1, ... values."""
    return np.concatenate([[0], values.cumsum()])
