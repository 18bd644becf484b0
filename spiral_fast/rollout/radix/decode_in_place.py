"""Decode in place: all keys and values stay in the pool, a token's in one slot whoever reads it.

By the native kernel, in each layer a run of prompt tokens is read once for all requests below it, by the stacked
queries of them all; a request's own tokens follow, and its runs are merged by their log-sum-exp.

R running requests (rows), M pairs of a run and a row below it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from spiral_fast.path_attention import Group
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.rollout.radix.prefill import attention_over
from spiral_fast.rollout.radix.runs import shared_runs
from spiral_fast.rollout.radix.tree import Node

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
        self._write = torch.from_numpy(self._own[rows, self._length]).to(self._pool.keys[0].device)
        self._length += 1
        self._arrange()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._store(layer, key, value)
        return self._attend(query[0].transpose(0, 1).contiguous(), keys, values, scale)[None]

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's key and value (1, Hkv, R, D); returns the layer's pool."""
        self._pool.write(layer, self._write, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._pool.keys[layer], self._pool.values[layer]

    def _arrange(self) -> None:
        if self._runs is None:
            slots, below, places = shared_runs(self._prompt)
            self._runs = *slots, *below, *places
            self._partial: torch.Tensor | None = None  # (M, Hq, D + 2) scratch

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        from spiral_kernels import _native

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
    """Each row reads its whole path on its own, on any device and in any dtype: bits that do not depend on who shares
    it, and sliding windows."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        keys, values = self._store(layer, key, value)
        return self._attention(window).attend(query[0].transpose(0, 1), keys, values, scale)[None]

    def _arrange(self) -> None:
        if self._runs is None:
            self._runs = tuple(node.path_slots() for node in self._prompt)
        own = zip(self._runs, self._own, self._length, strict=True)
        paths = [np.concatenate([prompt, slots[:n]]) for prompt, slots, n in own]
        self._attention = cache(lambda window: self._over(paths, window))

    def _over(self, paths: list[np.ndarray], window: int | None):
        seen = [path if window is None else path[-window:] for path in paths]
        groups = [Group(path, np.array([row]), np.array([len(path)])) for row, path in enumerate(seen)]
        return attention_over(groups, self._pool.keys[0])
