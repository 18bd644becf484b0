"""Prefix trees: a batch of traces with every distinct prefix token once.

    tree = PrefixTree.from_segments([[[7, 8], [1, 2, 3]], [[7, 8], [1, 5]]])   # (prompt, sampled) of two traces

    node 0: 7 8 1 ─┬─ node 1: 2 3        row          0  1  2 | 3  4 | 5
                   └─ node 2: 5          tokens       7  8  1 | 2  3 | 5
                                         positions    0  1  2 | 3  4 | 3
    node         0   1   2
    start        0   3   5               trace        0  0  0  0  0   1  1  1  1
    end          3   5   6               trace_rows   0  1  2  3  4   0  1  2  5
    parent      -1   0   0
    subtree_end  6   5   6               edge_trace   0  0  0  1  1
                                         edge_row     1  2  3  1  2   the hidden row that predicts
    Row q sees row k if and only if      edge_target  1  2  3  1  5   this token,
    k <= q < subtree_end[row_node[k]].   edge_position 2 3  4  2  3   which the trace has at this position

A forward over the tree gives every trace the hidden states that it has alone: `positions` are its rotary positions, and
a row sees exactly the tokens before it in its own trace. Rows 1 and 2 above predict the tokens of both traces: edge
rows are per trace and never merged, since rollout log-prob and credit differ, also where hidden row and target agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiral_kernels.dispatch import choose_backend, native_unavailable, register_backends
from spiral_kernels.prefix_tree.reference import prefix_tree_reference

__all__ = ["PrefixTree"]

Integers = np.ndarray | Tensor


class PrefixTree(NamedTuple):
    """All int64. T rows (tokens computed), M nodes depth-first, R edge rows and N tokens in the order of the traces.

    A node is a run of rows that every trace below passes through; its children follow in order of first appearance, and
    rows are numbered depth-first too (end[m] == start[m + 1]). A trace may end inside a node.
    """

    tokens: Tensor  # (T,) token id of each row
    positions: Tensor  # (T,) depth of each row in its path, from 0
    start: Tensor  # (M,) first row of the node
    end: Tensor  # (M,) row after its last
    parent: Tensor  # (M,) node above, -1 for a root; several problems are several roots
    subtree_end: Tensor  # (M,) row after the last of the node and all below it
    edge_row: Tensor  # (R,) row of the token before the sampled one, whose hidden state predicts it; -1: not computed
    edge_target: Tensor  # (R,) the sampled token
    edge_trace: Tensor  # (R,) index of the trace
    edge_position: Tensor  # (R,) where the trace has the sampled token
    trace_rows: Tensor  # (N,) row of each token of each trace; -1: not computed
    trace_offsets: Tensor  # (n + 1,) trace i has trace_rows[trace_offsets[i] : trace_offsets[i + 1]]

    @classmethod
    def build(
        cls,
        tokens: Integers,
        offsets: Integers,
        sampled: Integers,
        *,
        live: Integers | None = None,
        min_shared_run: int = 1,
    ) -> PrefixTree:
        """The tree of the traces tokens[offsets[i] : offsets[i + 1]]. Numpy arrays or CPU tensors.

        tokens (N,) int32 or int64, ids >= 0. offsets (n + 1,) int64, from 0 to N; empty traces are fine. sampled (N,)
        bool: the tokens that get an edge row, never a trace's first, which nothing precedes.

        live (R,) bool, one per edge row (weight != 0): tokens that no live row comes after are left out, their
        trace_rows and the edge_row of dead rows that would need them are -1; every live row has its hidden row. So the
        last token of a trace goes too. None computes every token.

        min_shared_run: traces share what follows a branch only if they agree on that many tokens there, else each gets
        its own copy. 1 shares everything; larger values keep chance agreements, such as the first word of every trace
        after a prompt, from becoming many short nodes. A trace that is a prefix of another is always shared.

        Raises ValueError with one line. Runs at memory speed: one read of the tokens, one look-up per branch passed.
        """
        tokens = _array("tokens (N,)", tokens, "int32", "int64")
        offsets = _array("offsets (n + 1,)", offsets, "int64")
        sampled = _array("sampled (N,)", sampled, "bool")
        live = None if live is None else _array("live (R,)", live, "bool")
        _check(tokens, offsets, sampled, live, min_shared_run)
        if choose_backend("prefix_tree", torch.device("cpu"), getattr(torch, str(tokens.dtype))) == "native":
            from spiral_kernels._native import prefix_tree as run
        else:
            run = prefix_tree_reference
        arrays = run(tokens, offsets, sampled, live, min_shared_run)
        return cls(*map(torch.from_numpy, arrays), torch.from_numpy(offsets.copy()))

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[Sequence[Sequence[int] | Integers]],
        *,
        live: Integers | None = None,
        min_shared_run: int = 1,
    ) -> PrefixTree:
        """The tree of traces given as segments of token ids that are in turn given and sampled.

        segments[i] is [prompt, sampled], or [prompt, sampled, tool output, sampled, ...]; each a list of ints, a numpy
        array or a CPU tensor, empty ones are fine. The rest as `build`, which is faster where tokens are flat already.
        """
        pieces, lengths, is_sampled = [], [0], []
        for i, trace in enumerate(segments):
            arrays = [_segment(i, j, segment) for j, segment in enumerate(trace)]
            pieces += arrays
            is_sampled += [j % 2 == 1 for j in range(len(arrays))]
            lengths.append(sum(map(len, arrays)))
        tokens = np.concatenate([np.zeros(0, np.int64), *pieces])
        sampled = np.repeat(np.array(is_sampled, bool), [len(piece) for piece in pieces])
        return cls.build(tokens, np.cumsum(lengths), sampled, live=live, min_shared_run=min_shared_run)

    def to(self, device: str | torch.device) -> PrefixTree:
        """The same tree on `device`."""
        return PrefixTree(*(tensor.to(device) for tensor in self))

    @property
    def row_node(self) -> Tensor:
        """(T,) the node of each row."""
        return torch.repeat_interleave(self.end - self.start)

    @property
    def logical_tokens(self) -> int:
        """N: tokens of the traces, each counted in every trace."""
        return len(self.trace_rows)

    @property
    def computed_tokens(self) -> int:
        """T: rows of the tree."""
        return len(self.tokens)

    @property
    def logical_attention_area(self) -> int:
        """Pairs (query, key) of causal attention over each trace alone; attention's FLOPs are proportional to it."""
        lengths = self.trace_offsets.diff()
        return int((lengths * (lengths + 1) // 2).sum())

    @property
    def attention_area(self) -> int:
        """Pairs (query, key) in which the query sees the key in the tree."""
        return int((self.positions + 1).sum())


def _need(good: bool, message: str) -> None:
    if not good:
        raise ValueError(f"prefix_tree: {message}")


def _array(name: str, values: Integers, *dtypes: str) -> np.ndarray:
    is_tensor = isinstance(values, Tensor)
    wanted = f"{name} must be a one-dimensional numpy array or CPU tensor of {' or '.join(dtypes)}"
    _need(is_tensor or isinstance(values, np.ndarray), f"{wanted}, got {type(values).__name__}")
    dtype = str(values.dtype).removeprefix("torch.")
    place = f" on {values.device}" if is_tensor and values.device.type != "cpu" else ""
    good = dtype in dtypes and values.ndim == 1 and not place
    _need(good, f"{wanted}, got {tuple(values.shape)} {dtype}{place}")
    return np.ascontiguousarray(values.numpy() if is_tensor else values)


def _check(tokens, offsets, sampled, live, min_shared_run) -> None:
    n_tokens = len(tokens)
    _need(len(offsets) > 0, "offsets must be (n + 1,) for n traces, got none; no traces are offsets [0]")
    _need(offsets[0] == 0, f"offsets must begin with 0, got {offsets[0]}")
    lengths = np.diff(offsets)
    for i in np.flatnonzero(lengths < 0)[:1]:
        _need(False, f"offsets must never fall: trace {i} is from {offsets[i]} to {offsets[i + 1]}")
    _need(offsets[-1] == n_tokens, f"offsets must end with the number of tokens, {n_tokens}, got {offsets[-1]}")
    _need(len(sampled) == n_tokens, f"sampled has {len(sampled)} entries for {n_tokens} tokens")
    if n_tokens and tokens.min() < 0:
        where = int((tokens < 0).argmax())
        trace = int(np.searchsorted(offsets, where, side="right")) - 1
        _need(False, f"token {where - offsets[trace]} of trace {trace} is {tokens[where]}; token ids are >= 0")
    begun = np.flatnonzero(lengths)
    for i in begun[sampled[offsets[begun]]][:1]:
        _need(False, f"the first token of trace {i} is sampled, but there is none before it to predict it")
    if live is not None:
        n_edges = np.count_nonzero(sampled)
        _need(len(live) == n_edges, f"live has {len(live)} entries for {n_edges} sampled tokens")
    is_count = isinstance(min_shared_run, int) and not isinstance(min_shared_run, bool) and min_shared_run >= 1
    _need(is_count, f"min_shared_run must be an integer >= 1, got {min_shared_run!r}")


def _segment(trace: int, index: int, segment) -> np.ndarray:
    if isinstance(segment, Tensor):
        _need(
            segment.device.type == "cpu", f"segment {index} of trace {trace} is on {segment.device}; move it to the CPU"
        )
    try:
        array = np.asarray(segment)
    except (TypeError, ValueError):  # ragged, or a dtype numpy lacks
        array = np.array(None)
    good = array.ndim == 1 and (array.dtype in (np.int32, np.int64) or (array.size == 0 and isinstance(segment, list)))
    _need(good, f"segment {index} of trace {trace} must be a list of token ids, or one-dimensional int32 or int64")
    return array.astype(np.int64, copy=False)


def _native_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return _why_not_on(device) or native_unavailable() or _old_native()


def _old_native() -> str | None:
    from spiral_kernels import _native

    return (
        None
        if hasattr(_native, "prefix_tree")
        else "spiral_kernels._native is of an older version; reinstall spiral-fast"
    )


def _why_not_on(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "a tree is built on the CPU; move it with PrefixTree.to"


# "torch": as for every operation, the one that needs nothing compiled; here Python and numpy.
register_backends("prefix_tree", {"native": _native_why_not, "torch": lambda device, dtype: _why_not_on(device)})
