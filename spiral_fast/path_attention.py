"""Attention of rows to prefixes of paths of slots, by the native kernel (CPU, float32 and bfloat16).

A row's result is a function of its query and of the keys and values it sees, to the last bit: not of other rows, nor of
how paths are cut into groups. Softmax and sums in float32, over tiles of 64 keys counted from the start of the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from spiral_fast.lists import Lists
from spiral_kernels.dispatch import native_unavailable


def native_serves(keys: torch.Tensor) -> bool:
    """Whether the native kernels attend to keys of this device and dtype."""
    return keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16) and native_missing() is None


def native_missing() -> str | None:
    """Why the native kernels cannot be used; None if they can."""
    reason = native_unavailable()
    if reason is None:
        from spiral_kernels import _native

        if not hasattr(_native, "decode_runs"):
            reason = "spiral_kernels._native was built from older sources; reinstall spiral-fast"
    return reason


class Group(NamedTuple):
    slots: np.ndarray  # (n,) int64, of a path from its first token on
    rows: np.ndarray  # (r,) int64
    visible: np.ndarray  # (r,) int64 in 1..n: row i sees the first visible[i] tokens of the path


class PathAttention:
    def __init__(self, groups: Sequence[Group]):
        """Every row of the query stands in one group."""
        slots, rows, visible = (Lists.of(lists) for lists in zip(*groups, strict=True))
        self._lists = *slots, *rows, visible.values

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """query (T, Hq, D), keys and values (slots, Hkv, D), contiguous; returns (T, Hq, D)."""
        from spiral_kernels import _native

        query = query.contiguous()
        out = torch.empty_like(query)
        _native.decode_paths(query, keys, values, scale, *self._lists, out, torch.get_num_threads())
        return out
