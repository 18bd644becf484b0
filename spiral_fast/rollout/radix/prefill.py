"""Prefill: the uncached tokens of many prompts packed into forwards of at most `prefill_chunk` tokens.

Each token's keys and values are written to the pool before anything attends in that layer, and every query reads its
whole prefix from the pool: a prompt may continue a prefix that another prompt of the same forward computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from spiral_fast.path_attention import Group, PathAttention, native_serves
from spiral_fast.rollout.radix.pool import SCRATCH, Pool
from spiral_fast.rollout.radix.tree import Node

_PIECE = 1024  # most queries of one row of a batch: bounds the mask to _PIECE x keys
_KEYS = 1 << 17  # most keys gathered at once, tokens
_PADDING = 1.5  # most padded over real query-key pairs of a batch


@dataclass
class Run:
    """Tokens to compute: those of `path` from `start` on."""

    tokens: np.ndarray  # (n,) int64
    path: np.ndarray  # (start + n,) int64 slots of the whole prefix up to the last token
    write: bool = True  # False: the keys and values are in the pool already, only the hidden state is wanted

    @property
    def start(self) -> int:
        return len(self.path) - len(self.tokens)


class Plan:
    """What one prefill computes: runs of tokens, and the nodes whose last token's hidden state it brings."""

    def __init__(self):
        self.runs: list[Run] = []
        self.wanted: list[tuple[Node, int]] = []  # index among the tokens of all runs
        self._tokens = 0

    def compute(self, node: Node, path: np.ndarray) -> None:
        """All tokens of a new node; path: slots of its whole prefix."""
        self._add(node, Run(node.tokens, path))

    def compute_last(self, node: Node, path: np.ndarray) -> None:
        """The last token of a prefix whose keys and values are there already."""
        self._add(node, Run(node.tokens[-1:], path, write=False))

    def brings(self, node: Node) -> bool:
        """Whether the hidden state at the end of `node` comes with a planned run; if so it is wanted."""
        if any(node is other for other, _ in self.wanted):
            return True
        first = 0
        for run in self.runs:  # `node` may have been split off a run's middle
            found = np.flatnonzero(run.path[run.start :] == node.slots[-1])
            if len(found):
                self.wanted.append((node, first + int(found[0])))
                return True
            first += len(run.tokens)
        return False

    def _add(self, node: Node, run: Run) -> None:
        self.runs.append(run)
        self._tokens += len(run.tokens)
        self.wanted.append((node, self._tokens - 1))


@dataclass
class _Piece:
    first: int  # index of its first query in the chunk
    queries: int
    path: np.ndarray  # slots of all keys its last query sees


class _Batch:
    """Pieces padded to one rectangle: query and key indices and the mask."""

    def __init__(self, pieces: list[_Piece], device: torch.device, window: int | None):
        q = max(piece.queries for piece in pieces)
        k = max(len(piece.path) for piece in pieces)
        queries = np.zeros((len(pieces), q), np.int64)
        keys = np.full((len(pieces), k), SCRATCH, np.int64)
        last = np.zeros((len(pieces), q), np.int64)  # last visible key of each query; padding sees key 0
        self.index = []  # where each query of the chunk stands in the flattened rectangle
        for row, piece in enumerate(pieces):
            n = piece.queries
            queries[row, :n] = np.arange(piece.first, piece.first + n)
            keys[row, : len(piece.path)] = piece.path
            last[row, :n] = np.arange(len(piece.path) - n, len(piece.path))
            self.index.append((piece.first, row * q + np.arange(n)))
        self.queries = torch.from_numpy(queries).to(device)
        self.keys = torch.from_numpy(keys).to(device)
        last = torch.from_numpy(last).to(device)
        distance = last[:, None, :, None] - torch.arange(k, device=device)  # (B, 1, q, k)
        self.mask = distance >= 0
        if window is not None:
            self.mask &= distance < window

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """query (T, Hq, D), keys and values (slots, Hkv, D) -> (B q, Hq, D)"""
        q = query[self.queries].transpose(1, 2)
        k, v = (source[self.keys].transpose(1, 2) for source in (keys, values))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)


class _PaddedPieces:
    """Attention in plain torch: what PathAttention computes, for any device and dtype, and within a sliding window."""

    def __init__(self, groups: list[Group], device: torch.device, window: int | None):
        pieces, rows = [], 0
        for path, at, visible in groups:
            for begin in range(0, len(at), _PIECE):
                end = min(begin + _PIECE, len(at))
                first = 0 if window is None else max(0, visible[begin] - window)
                pieces.append(_Piece(int(at[begin]), end - begin, path[first : visible[end - 1]]))
            rows += len(at)
        self._batches = [_Batch(group, device, window) for group in _group(pieces)]
        index, offset = np.empty(rows, np.int64), 0
        for batch in self._batches:
            for start, flat in batch.index:
                index[start : start + len(flat)] = flat + offset
            offset += batch.queries.numel()
        self._index = torch.from_numpy(index).to(device)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """query (T, Hq, D), keys and values (slots, Hkv, D); returns (T, Hq, D)."""
        parts = [batch.attend(query, keys, values, scale) for batch in self._batches]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[self._index]


def attention_over(groups: list[Group], keys: torch.Tensor, window: int | None = None) -> PathAttention | _PaddedPieces:
    """Each row sees the last `window` tokens (None: all) of what its group shows it; a group's rows follow one another,
    each sees one token more than the one before."""
    if window is None and native_serves(keys):
        return PathAttention(groups)
    return _PaddedPieces(groups, keys.device, window)


class Chunk:
    """One forward's tokens and the object the model attends with."""

    def __init__(self, pool: Pool, runs: list[tuple[Run, int, int]], device: torch.device):
        """runs: (run, from, to) with from..to the tokens of the run in this chunk."""
        self._pool = pool
        tokens, positions, slots, groups, first = [], [], [], [], 0
        for run, begin, end in runs:
            n, at = end - begin, np.arange(run.start + begin, run.start + end)
            tokens.append(run.tokens[begin:end])
            positions.append(at)
            slots.append(run.path[at] if run.write else np.full(n, SCRATCH))
            groups.append(Group(run.path[: run.start + end], np.arange(first, first + n), at + 1))
            first += n
        self.tokens, self.positions, self._slots = (
            torch.from_numpy(np.concatenate(parts)).to(device) for parts in (tokens, positions, slots)
        )
        self._attention = cache(lambda window: attention_over(groups, pool.keys[0], window))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
        self._pool.write(layer, self._slots, key, value)
        return self._attention(window).attend(query, self._pool.keys[layer], self._pool.values[layer], scale)[None]


def chunks(runs: list[Run], size: int) -> list[list[tuple[Run, int, int]]]:
    """Cut the runs, in order, into lists of at most `size` tokens; a run may continue in the next list."""
    out, room = [[]], size
    for run in runs:
        begin, n = 0, len(run.tokens)
        while begin < n:
            if not room:
                out.append([])
                room = size
            end = min(n, begin + room)
            out[-1].append((run, begin, end))
            room -= end - begin
            begin = end
    return out


def _group(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces of similar shape together: little padding, few batches."""
    groups: list[list[_Piece]] = []
    real = q = 0
    for piece in sorted(pieces, key=lambda piece: (len(piece.path), piece.queries)):
        k, n = len(piece.path), len(groups[-1]) + 1 if groups else 1
        area = real + piece.queries * k
        if n > 1 and n * k <= _KEYS and n * k * max(q, piece.queries) <= _PADDING * area:
            groups[-1].append(piece)
            real, q = area, max(q, piece.queries)
        else:
            groups.append([piece])
            real, q = piece.queries * k, piece.queries
    return groups
