"""Decode in plain torch: where the native kernel does not serve the device or dtype, or is not built.

A request's keys are its prompt's, shared by all requests with that prompt, and its own. The queries of a group
(requests with one prompt) are stacked and attend to the prompt's keys once; the result enters each request's own
attention as one more key, whose score is the log-sum-exp of the prompt's scores. Each group has a padded copy of its
prompt's keys and values, and each request a buffer for its own.

R running requests (rows), G groups, m rows of the largest group, P prompt positions, S own positions, Hq = Hkv g heads.
"""

from __future__ import annotations

import numpy as np
import torch

from spiral_fast.rollout.radix.pool import SCRATCH, Pool
from spiral_fast.rollout.radix.rows import fill_holes
from spiral_fast.rollout.radix.tree import Node

_FIRST_BAND = 128  # prompts up to 128, 512, 2048, ... tokens lie in one rectangle each: padding stays bounded
_FIRST = 32  # own positions of the first buffer


class PromptGroups:
    """Keys and values of the running groups' prompts of one length band, padded to a rectangle."""

    def __init__(self, pool: Pool):
        self._pool = pool
        heads, head_dim = pool.keys[0].shape[1:]
        # per layer (at least G, Hkv, at least P, D)
        self.keys = [key.new_zeros((0, heads, 0, head_dim)) for key in pool.keys]
        self.values = list(self.keys)
        self.lengths = np.empty(0, np.int64)  # (G,) prompt tokens
        self.longest = 0  # P
        self.rows = torch.empty(0)  # (G m,) row of each member; missing members repeat a row
        self.bias: torch.Tensor | None = None  # (G, 1, 1, P): 0 or -inf; None: no padding

    def add(self, paths: list[np.ndarray]) -> np.ndarray:
        """Copy the prompts with these slots out of the pool; returns their group numbers."""
        held, lengths = len(self.lengths), np.array([len(path) for path in paths])
        slots = np.full((len(paths), lengths.max()), SCRATCH, np.int64)
        for row, path in enumerate(paths):
            slots[row, : len(path)] = path
        index = torch.from_numpy(slots).to(self.keys[0].device)
        self.lengths = np.concatenate([self.lengths, lengths])
        for buffers, source in ((self.keys, self._pool.keys), (self.values, self._pool.values)):
            for layer, old in enumerate(buffers):
                buffers[layer] = _grown(old, len(self.lengths), slots.shape[1])
                buffers[layer][held : len(self.lengths), :, : slots.shape[1]] = source[layer][index].transpose(1, 2)
        return np.arange(held, held + len(paths))

    def keep(self, alive: np.ndarray) -> np.ndarray:
        """Drop the groups not `alive` (G,) bool; returns the new number of each old group that is."""
        source, target = fill_holes(alive)
        number = np.arange(len(alive))
        number[source] = target
        if len(source):
            src, dst = (torch.from_numpy(groups).to(self.keys[0].device) for groups in (source, target))
            used = int(self.lengths[source].max())
            for buffers in (self.keys, self.values):
                for buffer in buffers:
                    buffer[dst, :, :used] = buffer[src, :, :used]
            self.lengths[target] = self.lengths[source]
        self.lengths = self.lengths[: int(alive.sum())]
        return number

    def arrange(self, rows: np.ndarray, group: np.ndarray) -> np.ndarray:
        """`rows` (n,) and the `group` (n,) of each. Returns each one's place in the (G, m) rectangle."""
        device = self.keys[0].device
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=len(self.lengths))
        rank = np.empty(len(rows), np.int64)
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        m = int(counts.max())
        place = group * m + rank
        members = np.full(len(counts) * m, rows[0], np.int64)
        members[place] = rows
        self.rows = torch.from_numpy(members).to(device)
        self.longest = int(self.lengths.max())
        self.bias = None
        if (self.lengths != self.longest).any():
            lengths = torch.from_numpy(self.lengths).to(device)
            hidden = torch.arange(self.longest, device=device) >= lengths[:, None]
            self.bias = self.keys[0].new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
        return place

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """query (R, Hkv, g, D) -> (G m, Hkv, g, D) and the log-sum-exp (G m, Hkv, g, 1)."""
        groups, (heads, g, head_dim) = len(self.lengths), query.shape[1:]
        keys, values = (x[layer][:groups, :, : self.longest] for x in (self.keys, self.values))
        stacked = query.index_select(0, self.rows).view(groups, -1, heads, g, head_dim).transpose(1, 2)
        scores = torch.matmul(stacked.reshape(groups, heads, -1, head_dim) * scale, keys.transpose(2, 3))
        if self.bias is not None:
            scores += self.bias
        highest = scores.amax(-1, keepdim=True)
        weight = scores.sub_(highest).exp_()
        total = weight.sum(-1, keepdim=True)
        out, lse = torch.matmul(weight, values).div_(total), highest.add_(total.log_())
        out, lse = (x.view(groups, heads, -1, g, x.shape[-1]).transpose(1, 2).flatten(0, 1) for x in (out, lse))
        return out, lse


class CopiedPrompts:
    """A decode batch (see decode.py)."""

    def __init__(self, pool: Pool):
        self._pool = pool
        heads, head_dim = pool.keys[0].shape[1:]
        self._keys = [key.new_zeros((0, heads, 0, head_dim)) for key in pool.keys]  # (rows, Hkv, own positions, D)
        self._values = list(self._keys)
        self._bands: dict[int, PromptGroups] = {}
        self._band = np.empty(0, np.int64)  # (R,) band of each row's prompt
        self._group = np.empty(0, np.int64)  # (R,) its group in that band
        self._length = np.empty(0, np.int64)  # (R,) own positions filled
        self._limit = np.empty(0, np.int64)  # (R,) own positions it may come to fill
        self._arranged = False
        self._place = torch.empty(0)

    def __len__(self) -> int:
        return len(self._band)

    def add(self, prompts: list[Node], members: list[int], limits: np.ndarray) -> None:
        paths = [node.path_slots() for node in prompts]
        band = np.array([_band(len(path)) for path in paths])
        group = np.empty(len(paths), np.int64)
        for b in np.unique(band):
            groups = self._bands.setdefault(int(b), PromptGroups(self._pool))
            group[band == b] = groups.add([path for path, own in zip(paths, band, strict=True) if own == b])
        self._band = np.concatenate([self._band, np.repeat(band, members)])
        self._group = np.concatenate([self._group, np.repeat(group, members)])
        self._length = np.concatenate([self._length, np.zeros(sum(members), np.int64)])
        self._limit = np.concatenate([self._limit, limits])
        self._reserve()
        self._arranged = False

    def remove(self, moves: tuple[np.ndarray, np.ndarray], left: int) -> None:
        source, target = moves
        if len(source):
            src, dst = (torch.from_numpy(rows).to(self._keys[0].device) for rows in moves)
            used = int(self._length.max())
            for buffers in (self._keys, self._values):
                for buffer in buffers:
                    buffer[dst, :, :used] = buffer[src, :, :used]
            for array in (self._band, self._group, self._length, self._limit):
                array[target] = array[source]
        for name in ("_band", "_group", "_length", "_limit"):
            setattr(self, name, getattr(self, name)[:left])
        if not left:
            self._keys, self._values = (
                [x.new_zeros((0, x.shape[1], 0, x.shape[3])) for x in b] for b in (self._keys, self._values)
            )
        for band in list(self._bands):
            rows, groups = self._band == band, self._bands[band]
            alive = np.zeros(len(groups.lengths), bool)
            alive[self._group[rows]] = True
            if not alive.any():
                del self._bands[band]
            elif not alive.all():
                self._group[rows] = groups.keep(alive)[self._group[rows]]
        self._arranged = False

    def begin_step(self) -> None:
        device, rows = self._keys[0].device, len(self)
        if not self._arranged:
            self._arrange()
        self._reserve()
        held = self._keys[0].shape[2]
        heads = self._keys[0].shape[1]
        at = (np.arange(rows) * heads * held + self._length)[:, None] + np.arange(heads) * held
        self._write = torch.from_numpy(at.ravel()).to(device)
        self._used = int(self._length.max()) + 1
        self._bias = None
        if (self._length != self._used - 1).any():
            length = torch.from_numpy(self._length).to(device)
            hidden = torch.arange(self._used, device=device) > length[:, None]
            self._bias = self._keys[0].new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
        self._length += 1

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows, heads, used = len(self), key.shape[1], self._used
        head_dim = key.shape[3]
        query = query[0].transpose(0, 1).reshape(rows, heads, -1, head_dim)  # (R, Hkv, g, D)
        for buffer, new in ((self._keys[layer], key), (self._values[layer], value)):
            buffer.view(-1, head_dim).index_copy_(0, self._write, new[0].transpose(0, 1).reshape(-1, head_dim))
        parts = [groups.attend(layer, query, scale) for groups in self._bands.values()]
        prompt, lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        prompt, lse = prompt.index_select(0, self._place), lse.index_select(0, self._place)
        scores = torch.matmul(query * scale, self._keys[layer][:rows, :, :used].transpose(2, 3))
        if self._bias is not None:
            scores += self._bias
        highest = torch.maximum(scores.amax(-1, keepdim=True), lse)
        weight, prompt_weight = scores.sub_(highest).exp_(), lse.sub_(highest).exp_()
        out = torch.matmul(weight, self._values[layer][:rows, :, :used]).addcmul_(prompt_weight, prompt)
        out.div_(prompt_weight.add_(weight.sum(-1, keepdim=True)))
        return out.view(1, rows, -1, head_dim)

    def _arrange(self) -> None:
        place, offset = np.empty(len(self), np.int64), 0
        for band, groups in self._bands.items():
            rows = np.flatnonzero(self._band == band)
            place[rows] = groups.arrange(rows, self._group[rows]) + offset
            offset += len(groups.rows)
        self._place = torch.from_numpy(place).to(self._keys[0].device)
        self._arranged = True

    def _reserve(self) -> None:
        """Room for every row and one more own position: by doubling, up to what the rows may come to need."""
        rows, _, positions, _ = self._keys[0].shape
        need = int(self._length.max(initial=0)) + 1
        if rows >= len(self) and positions >= need:
            return
        if positions < need:
            need = max(need, min(max(_FIRST, 2 * positions), int(self._limit.max())))
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                buffers[layer] = _grown(old, len(self), need)


def _band(length: int) -> int:
    band = _FIRST_BAND
    while band < length:
        band *= 4
    return band


def _grown(old: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
    """At least (rows, Hkv, positions, D), new places zero (padding must be finite); `old` itself if large enough."""
    if old.shape[0] >= rows and old.shape[2] >= positions:
        return old
    new = old.new_zeros((max(rows, old.shape[0]), old.shape[1], max(positions, old.shape[2]), old.shape[3]))
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
