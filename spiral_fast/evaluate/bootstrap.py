"""Intervals by resampling the problems."""

from __future__ import annotations

import numpy as np

LEVEL = 0.95


def bootstrap_interval(values: np.ndarray, resamples: int, seed: int) -> list[float]:
    """Percentile interval [low, high] at LEVEL of the mean of `values` (P,), one value per problem.

    Metrics with the same number of problems and the same seed are resampled alike, so that they can be compared.
    """
    chosen = _chosen(len(values), resamples, seed)
    return _percentiles(np.asarray(values, np.float64)[chosen].mean(axis=1))


def bootstrap_ratio(hits: np.ndarray, counts: np.ndarray, resamples: int, seed: int) -> list[float] | None:
    """The same of sum(hits) / sum(counts): a share of traces of which each problem has a number of its own, (P,) each.

    Resamples without any such trace are left out; None where there is no such trace at all.
    """
    hits, counts = np.asarray(hits, np.float64), np.asarray(counts, np.float64)
    if not counts.any():
        return None
    chosen = _chosen(len(counts), resamples, seed)
    below = counts[chosen].sum(axis=1)
    some = below > 0
    return _percentiles(hits[chosen].sum(axis=1)[some] / below[some])


def _chosen(problems: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, P) indices of problems"""
    return np.random.default_rng(seed).integers(problems, size=(resamples, problems))


def _percentiles(means: np.ndarray) -> list[float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]
