"""Intervals by resampling the problems."""

from __future__ import annotations

import numpy as np

LEVEL = 0.95


def bootstrap_interval(values: np.ndarray, resamples: int, seed: int) -> list[float]:
    """Percentile interval [low, high] at LEVEL of the mean of `values` (P,), one value per problem.

    Metrics with the same number of problems and the same seed are resampled alike, so that they can be compared.
    """
    chosen = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    means = np.asarray(values, np.float64)[chosen].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]
