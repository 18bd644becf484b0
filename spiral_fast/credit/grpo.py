"""GRPO baseline: reward minus the group's mean, not divided by a standard deviation (arXiv 2402.03300, 2503.20783)."""

from __future__ import annotations

import numpy as np


def grpo_credits(rewards: np.ndarray) -> np.ndarray:
    """rewards (N,) float64 of one problem's group -> credits (N,) r - mean(r), before the gate.

    A credit that is zero in exact arithmetic is 0.0: integer rewards are compared as integers (N r against sum r),
    other rewards count as equal to the mean within 1e-9 max|r|.
    """
    n = len(rewards)
    numerator = n * rewards - rewards.sum()  # exact for integer rewards: float64 holds integers to 2^53
    largest = np.abs(rewards).max()
    exact = np.all(rewards == np.round(rewards)) and 2 * n * largest < 2.0**53
    credit = numerator / n
    return np.where(np.abs(credit) <= (0.0 if exact else 1e-9 * largest), 0.0, credit)
