"""pass@k: the probability that at least one of k independent traces is correct (arXiv 2107.03374, equation 1)."""

from __future__ import annotations

from math import comb


def pass_at_k(n_correct: int, n_samples: int, k: int) -> float:
    """Unbiased estimate from `n_correct` of `n_samples` traces: the share of the subsets of k with a correct trace."""
    if k > n_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {n_samples}")
    return 1.0 - comb(n_samples - n_correct, k) / comb(n_samples, k)
