"""Lists of different lengths in two arrays. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Lists(NamedTuple):
    """Lists of int64 laid end to end: list i is values[offsets[i] : offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def of(lists: Sequence[np.ndarray]) -> Lists:
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return Lists(np.concatenate(lists, dtype=np.int64) if lists else np.empty(0, np.int64), offsets)
