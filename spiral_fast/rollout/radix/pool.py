"""The pool of cached keys and values: one slot per token, the same slot number in every layer."""

from __future__ import annotations

import numpy as np
import torch

SCRATCH = 0  # slot that holds nothing: target of writes nobody reads, source of padding (always finite)


class Pool:
    """Keys and values of up to `capacity` tokens; memory grows with use, by doubling."""

    def __init__(self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        shape = (1, heads, head_dim)  # (slots, Hkv, D) per layer
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._top = 1  # slots ever handed out, SCRATCH included
        self._free: list[np.ndarray] = []

    def allocate(self, count: int) -> np.ndarray:
        """`count` free slots (int64). The caller keeps within `capacity`."""
        parts, missing = [], count
        while missing and self._free:
            run = self._free.pop()
            parts.append(run[:missing])
            if len(run) > missing:
                self._free.append(run[missing:])
            missing -= len(parts[-1])
        if missing:
            parts.append(np.arange(self._top, self._top + missing))
            self._top += missing
            self._grow()
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def held(self) -> int:
        """Slots handed out and not given back."""
        return self._top - 1 - sum(map(len, self._free))

    def free(self, slots: np.ndarray) -> None:
        if len(slots):
            self._free.append(slots)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """slots (T,), key and value (T, Hkv, D)."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def _grow(self) -> None:
        held = len(self.keys[0])
        if self._top <= held:
            return
        slots = min(max(self._top, 2 * held), self.capacity + 1)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                buffers[layer] = old.new_zeros((slots, *old.shape[1:]))
                buffers[layer][:held] = old
