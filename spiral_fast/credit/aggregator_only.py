"""Aggregation alone: the aggregation half of SPIRAL (arXiv 2606.23595, equation 9), search left as it is."""

from __future__ import annotations

import numpy as np

from spiral_fast.credit.spiral import spiral_credits


def aggregator_only_credits(rewards: np.ndarray, sets: np.ndarray, n_search: int) -> tuple[np.ndarray, np.ndarray]:
    """rewards (K, N2) float64 of the aggregation traces, sets (K, n) int64 -> search (N1,), aggregation (K, N2).

    search       A(y_i) = 0: search traces are sampled and quoted, never trained; the adapter they share with the
                 aggregations may still change them
    aggregation  A(y_j^G) = r_j - f(G)

    E[update] = K (N2 - 1) grad_agg J with J = E r(y^G). K = 1 and sets of all N1 traces are fine.
    """
    _, aggregation = spiral_credits(rewards, sets, n_search)
    return np.zeros(n_search), aggregation
