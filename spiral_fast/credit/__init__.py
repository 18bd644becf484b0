"""Credit: how the rewards of a problem's traces become one number per trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit.aggregator_only import aggregator_only_credits
from spiral_fast.credit.diversity import load_diversity, set_diversities
from spiral_fast.credit.gate import gate
from spiral_fast.credit.grpo import grpo_credits
from spiral_fast.credit.independent import independent_credits
from spiral_fast.credit.levels import level_credits
from spiral_fast.credit.poly_epo import poly_epo_credits
from spiral_fast.credit.search_only import search_only_credits
from spiral_fast.credit.sets import multiplicity
from spiral_fast.credit.spiral import spiral_credits
from spiral_fast.levels import levels_of, multipliers
from spiral_fast.trace import ProblemRollout, Trace


def credit_of(config: Config) -> Callable[[ProblemRollout], None]:
    """The function that fills `credit` and `gated` of every trace of a problem from the rewards and lengths.

    Raises ConfigError where `credit.diversity` cannot be loaded.
    """
    credit = config.credit
    diversity = load_diversity(credit.diversity)
    if config.rollout.levels:
        return _credit_of_levels(config)

    def credits(rollout: ProblemRollout) -> tuple[np.ndarray, np.ndarray]:
        """Search (N1,) and aggregation (K, N2), before the gate. Rewards are read where the algorithm needs them."""
        sets, n_search = rollout.sets, len(rollout.search)
        no_aggregation = np.zeros((len(rollout.aggregation), 0))
        match credit.algorithm:
            case "spiral":
                return spiral_credits(_aggregation_rewards(rollout), sets, n_search)
            case "grpo":
                return grpo_credits(_rewards(rollout.search)), no_aggregation
            case "aggregator_only":
                return aggregator_only_credits(_aggregation_rewards(rollout), sets, n_search)
            case "search_only":
                return search_only_credits(_aggregation_rewards(rollout), sets, n_search)
            case "independent":
                return independent_credits(_rewards(rollout.search), _aggregation_rewards(rollout), sets)
            case "poly_epo":
                values = set_diversities(rollout, diversity)
                return poly_epo_credits(_rewards(rollout.search), sets, values), no_aggregation

    def fill(rollout: ProblemRollout) -> None:
        search, aggregation = credits(rollout)
        _assign(rollout.search, search, credit.search_target_length)
        for group, values in zip(rollout.aggregation, aggregation, strict=True):
            _assign(group, values, credit.aggregation_target_length)

    return fill


def _credit_of_levels(config: Config) -> Callable[[ProblemRollout], None]:
    levels, search_target = levels_of(config), config.credit.search_target_length

    def fill(rollout: ProblemRollout) -> None:
        rewards = np.array([_rewards(group) for group in rollout.levels[-1].groups])
        sets = [level.members() for level in rollout.levels]
        search, *above = level_credits(rewards, sets, len(rollout.search), levels)
        _assign(rollout.search, search, search_target)
        for level, stage, credits in zip(levels, rollout.levels, above, strict=True):
            _assign(stage.population(), credits, level.target_length)

    return fill


def level_weights(config: Config) -> list[float]:
    """Factor on the loss rows of each level, search first; the top's is 1, `search_weight` acts on all below it."""
    levels, weight = levels_of(config), config.credit.search_weight
    if not config.rollout.levels:
        return [search_weight(config), 1.0]
    if weight != "unbiased":
        return [*[float(weight)] * len(levels), 1.0]
    m = multipliers(config.rollout.n_search, levels)
    return [float(m[-1] / one) for one in m]


def search_weight(config: Config) -> float:
    """Factor on the loss rows of search traces (not on their credits, so that zeros stay zeros).

    1 = the paper; `unbiased` makes the expected update a multiple of one gradient: for spiral K (N2 - 1) / M, of
    grad J; for independent K (N2 - 1) / (N1 - 1), of grad (E r(y) + J).
    """
    weight, rollout = config.credit.search_weight, config.rollout
    if weight != "unbiased":
        return float(weight)
    if config.credit.algorithm == "independent":
        m = rollout.n_search - 1
    else:
        m = multiplicity(rollout.set_sampler, rollout.n_search, rollout.set_size, rollout.n_sets)
    return rollout.n_sets * (rollout.n_aggregations - 1) / m


def _aggregation_rewards(rollout: ProblemRollout) -> np.ndarray:
    return np.array([_rewards(group) for group in rollout.aggregation])  # (K, N2)


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
