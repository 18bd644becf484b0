"""Decode by the native kernel: all keys and values stay in the pool, a token's in one slot whoever reads it.

In each layer a run of prompt tokens is read once for all requests below it, by the stacked queries of them all; a
request's own tokens follow, and its runs are merged by their log-sum-exp.

R running requests (rows), M pairs of a run and a row below it.
"""

from __future__ import annotations

import numpy as np
import torch

from spiral_fast.path_attention import Group, PathAttention
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.rollout.radix.runs import shared_runs
from spiral_fast.rollout.radix.tree import Node
from spiral_kernels import _native

_BLOCK = 32  # own slots a row takes at a time


class InPlace:
    """A decode batch (see decode.py)."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._prompt = np.empty(0, object)  # (R,) node where each row's prompt ends
        self._own = np.empty((0, _BLOCK), np.int64)  # (R, at least the most held) slots
        self._held = np.empty(0, np.int64)  # (R,) own slots
        self._length = np.empty(0, np.int64)  # (R,) of them filled
        self._limit = np.empty(0, np.int64)  # (R,) it may come to hold
        self._runs: tuple[np.ndarray, ...] | None = None  # for the kernel; None: rows have come or gone

    def __len__(self) -> int:
        return len(self._prompt)

    def add(self, prompts: list[Node], members: list[int], limits: np.ndarray) -> None:
        rows = sum(members)
        nodes = np.empty(len(prompts), object)
        nodes[:] = prompts
        self._prompt = np.concatenate([self._prompt, np.repeat(nodes, members)])
        self._own = np.pad(self._own, ((0, rows), (0, 0)))
        self._held, self._length = (np.pad(x, (0, rows)) for x in (self._held, self._length))
        self._limit = np.concatenate([self._limit, limits])
        self._runs = None

    def remove(self, moves: tuple[np.ndarray, np.ndarray], left: int) -> None:
        source, target = moves
        order = np.arange(left)
        order[target] = source
        gone = np.ones(len(self), bool)
        gone[order] = False
        for row in np.flatnonzero(gone):
            self._pool.free(self._own[row, : self._held[row]].copy())
        for name in ("_prompt", "_own", "_held", "_length", "_limit"):
            setattr(self, name, getattr(self, name)[order])
        self._runs = None

    def begin_step(self) -> None:
        rows = np.arange(len(self))
        for row in np.flatnonzero(self._length == self._held):
            self._take(row)
        self._write = torch.from_numpy(self._own[rows, self._length])
        self._length += 1
        self._arrange()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (R, heads, D)
        self._pool.write(layer, self._write, key, value)
        return self._attend(query.contiguous(), self._pool.keys[layer], self._pool.values[layer], scale)[None]

    def _arrange(self) -> None:
        if self._runs is None:
            slots, below, places = shared_runs(self._prompt)
            self._runs = *slots, *below, *places
            self._partial: torch.Tensor | None = None  # (M, Hq, D + 2) scratch

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        _, heads, head_dim = query.shape
        if self._partial is None:
            self._partial = torch.empty((len(self._runs[2]), heads, head_dim + 2), dtype=torch.float32)
        out = torch.empty_like(query)
        threads = torch.get_num_threads()
        _native.decode_runs(
            query, keys, values, scale, *self._runs, self._own, self._length, self._partial, out, threads
        )
        return out

    def _take(self, row: int) -> None:
        """Another block of slots for this row's own tokens."""
        held = int(self._held[row])
        count = min(_BLOCK, int(self._limit[row]) - held)
        if held + count > self._own.shape[1]:
            self._own = np.pad(self._own, ((0, 0), (0, self._own.shape[1])))
        self._own[row, held : held + count] = self._pool.allocate(count)
        self._held[row] += count


class RowByRow(InPlace):
    """Each row reads its whole path on its own: bits that do not depend on who shares it."""

    def _arrange(self) -> None:
        if self._runs is None:
            self._runs = tuple(node.path_slots() for node in self._prompt)
        self._attention = PathAttention(
            [
                Group(np.concatenate([prompt, own[:n]]), np.array([row]), np.array([len(prompt) + n]))
                for row, (prompt, own, n) in enumerate(zip(self._runs, self._own, self._length, strict=True))
            ]
        )

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return self._attention.attend(query, keys, values, scale)
