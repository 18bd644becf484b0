"""SPIRAL's credits for one problem (Algorithm 1, equations 8 and 9); the mathematics is `set_advantages`."""

from __future__ import annotations

import numpy as np
import torch

from spiral_kernels.set_advantages import set_advantages


def spiral_credits(rewards: np.ndarray, sets: np.ndarray, n_search: int) -> tuple[np.ndarray, np.ndarray]:
    """rewards (K, N2) float64 of the aggregation traces, sets (K, n) int64 indices of search traces.

    Returns search (N1,) and aggregation (K, N2) float64, before the gate, exact zeros as 0.0.
    """
    credits = set_advantages(torch.from_numpy(rewards)[None], torch.from_numpy(sets)[None], n_search)
    return credits.search[0].numpy(), credits.aggregation[0].numpy()
