"""Credit: how the rewards of a problem's traces become one number per trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit.gate import gate
from spiral_fast.credit.grpo import grpo_credits
from spiral_fast.credit.sets import multiplicity
from spiral_fast.credit.spiral import spiral_credits
from spiral_fast.trace import ProblemRollout, Trace


def credit_of(config: Config) -> Callable[[ProblemRollout], None]:
    """The function that fills `credit` and `gated` of every trace of a problem from the rewards and lengths."""
    credit = config.credit

    def spiral(rollout: ProblemRollout) -> None:
        rewards = np.array([_rewards(group) for group in rollout.aggregation])
        search, aggregation = spiral_credits(rewards, rollout.sets, len(rollout.search))
        _assign(rollout.search, search, credit.search_target_length)
        for group, credits in zip(rollout.aggregation, aggregation, strict=True):
            _assign(group, credits, credit.aggregation_target_length)

    def grpo(rollout: ProblemRollout) -> None:
        _assign(rollout.search, grpo_credits(_rewards(rollout.search)), credit.search_target_length)

    return {"spiral": spiral, "grpo": grpo}[credit.algorithm]


def search_weight(config: Config) -> float:
    """Factor on the loss rows of search traces (not on their credits, so that zeros stay zeros).

    1 = the paper; `unbiased` = K (N2 - 1) / M, which makes the expected update a multiple of the true gradient of J.
    """
    weight, rollout = config.credit.search_weight, config.rollout
    if weight != "unbiased":
        return float(weight)
    m = multiplicity(rollout.set_sampler, rollout.n_search, rollout.set_size, rollout.n_sets)
    return rollout.n_sets * (rollout.n_aggregations - 1) / m


def _rewards(traces: list[Trace]) -> np.ndarray:
    for trace in traces:
        if trace.reward is None:
            raise ValueError(f"trace {trace.key} has no reward: grade it before its credit is computed")
    return np.array([trace.reward for trace in traces], np.float64)


def _assign(traces: list[Trace], credits: np.ndarray, target: int | None) -> None:
    lengths = np.array([len(trace.tokens) for trace in traces])
    credits, gated = gate(credits, lengths, target)
    for trace, value, was_gated in zip(traces, credits, gated, strict=True):
        trace.credit, trace.gated = float(value), bool(was_gated)
