"""Search alone: the search half of SPIRAL (arXiv 2606.23595, equation 8), the aggregator left as it is."""

from __future__ import annotations

import numpy as np

from spiral_fast.credit.spiral import spiral_credits


def search_only_credits(rewards: np.ndarray, sets: np.ndarray, n_search: int) -> tuple[np.ndarray, np.ndarray]:
    """rewards (K, N2) float64 of the aggregation traces, sets (K, n) int64 -> search (N1,), aggregation (K, N2).

    search       A(y_i) = mean over the sets G with y_i of f(G) - mean f, f(G) = mean_j r_j; 0 if no set has it
    aggregation  A(y_j^G) = 0: aggregations only score the sets, N2 = 1 is enough

    E[update] = M grad_search J, M of `sets.multiplicity`.
    """
    search, aggregation = spiral_credits(rewards, sets, n_search)
    return search, np.zeros_like(aggregation)
