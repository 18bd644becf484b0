"""Ways to find the distinct prefixes of a batch and the row of every token: ours by backend, and its peers.

The peers give the rows' tokens and positions and the edge rows too, as PrefixTree does, but no nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from bench.prefix_tree.shapes import Batch
from spiral_kernels import PrefixTree, available_backends, force_backend

Builder = Callable[[Batch], tuple[int, np.ndarray]]  # number of distinct prefixes, row of each token of each trace


def builders() -> dict[str, Builder]:
    """By name, PrefixTree's fastest backend first."""
    backends = [name for name, why_not in available_backends("prefix_tree").items() if why_not is None]
    ours = {f"PrefixTree, {name}": functools.partial(_prefix_tree, name) for name in backends}
    return ours | {"sort and compare neighbours (numpy)": sort_and_compare, "trie of dicts": trie_of_dicts}


def _prefix_tree(backend: str, batch: Batch) -> tuple[int, np.ndarray]:
    force_backend(backend, "prefix_tree")
    tree = PrefixTree.build(*batch)
    force_backend(None, "prefix_tree")
    return tree.computed_tokens, tree.trace_rows.numpy()


def trie_of_dicts(batch: Batch) -> tuple[int, np.ndarray]:
    """One dict per token, as pure-Python tries (pygtrie, pytrie) are made."""
    root, rows = {}, []
    for begin, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        node = root
        for token in batch.tokens[begin:end].tolist():
            node = node.setdefault(token, {})
            rows.append(node)
    numbers: dict[int, int] = {}
    numbered = np.array([numbers.setdefault(id(node), len(numbers)) for node in rows], np.int64)
    _rows_and_edges(batch, numbered, len(numbers))
    return len(numbers), numbered


def sort_and_compare(batch: Batch) -> tuple[int, np.ndarray]:
    """Sort the traces as byte strings; what a trace shares with the one before it is what it shares with all before."""
    begins, ends = batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()
    big_endian = batch.tokens.astype(">u4")  # bytes in the order of the ids
    order = sorted(range(len(begins)), key=lambda i: big_endian[begins[i] : ends[i]].tobytes())
    rows, n_rows = np.empty(len(batch.tokens), np.int64), 0
    trace, before = np.zeros(0, np.int64), np.zeros(0, np.int64)  # tokens and rows of the trace before
    for i in order:
        previous, trace, here = trace, batch.tokens[begins[i] : ends[i]], rows[begins[i] : ends[i]]
        both = min(len(trace), len(previous))
        differ = trace[:both] != previous[:both]
        shared = int(differ.argmax()) if differ.any() else both
        here[:shared] = before[:shared]
        here[shared:] = n_rows + np.arange(len(trace) - shared)
        n_rows += len(trace) - shared
        before = here
    _rows_and_edges(batch, rows, n_rows)
    return n_rows, rows


def _rows_and_edges(batch: Batch, rows: np.ndarray, n_rows: int) -> tuple[np.ndarray, ...]:
    """Tokens and positions of the rows; hidden row, target, trace and position of the edge rows."""
    trace = np.repeat(np.arange(len(batch.offsets) - 1), np.diff(batch.offsets))
    position = np.arange(len(rows)) - batch.offsets[trace]
    tokens, positions = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    tokens[rows], positions[rows] = batch.tokens, position
    edges = np.flatnonzero(batch.sampled)
    return tokens, positions, rows[edges - 1], batch.tokens[edges], trace[edges], position[edges]
