"""Both levels, each by its own reward: GRPO on the search traces, GRPO on each set's aggregation traces."""

from __future__ import annotations

import numpy as np

from spiral_fast.credit.grpo import grpo_credits
from spiral_fast.credit.spiral import spiral_credits


def independent_credits(
    search_rewards: np.ndarray, rewards: np.ndarray, sets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """search_rewards (N1,), rewards (K, N2) float64 of the aggregation traces, sets (K, n) int64.

    search       A(y_i) = r(y_i) - mean r of the problem's search traces: what its sets score plays no part
    aggregation  A(y_j^G) = r_j - f(G), as in SPIRAL (arXiv 2606.23595, equation 9)

    E[update] = (N1 - 1) grad_search E r(y) + K (N2 - 1) grad_agg J: two objectives, search does not learn for J.
    Returns search (N1,) and aggregation (K, N2).
    """
    _, aggregation = spiral_credits(rewards, sets, len(search_rewards))
    return grpo_credits(search_rewards), aggregation
