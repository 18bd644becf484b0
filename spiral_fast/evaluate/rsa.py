"""Recursive self-aggregation (arXiv 2509.26626; paper §4): a population of traces, aggregated again and again."""

from __future__ import annotations

import numpy as np

from spiral_fast.rollout.engine import request_seed
from spiral_fast.trace import TraceKey


def rsa_sets(population: int, set_size: int, run_seed: int, problem: str, step: int, occasion: int = -1) -> np.ndarray:
    """Sets whose aggregations are the population after `step` (1, 2, ...): (population, set_size) int64.

    Each set is drawn anew from the previous population, `set_size` distinct members in ascending order as in training;
    the sets of a step are independent of each other. Random from (run seed, occasion, problem, step) alone.
    """
    rng = np.random.default_rng(request_seed(run_seed, occasion, TraceKey(problem, step, -1, -1)))
    return np.array([np.sort(rng.choice(population, set_size, replace=False)) for _ in range(population)])
