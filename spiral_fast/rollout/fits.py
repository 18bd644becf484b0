"""Refuse at start what could overflow the model's context or the engine's cache in the worst case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spiral_fast.config import Config, ConfigError
from spiral_fast.levels import largest_set, max_new_tokens
from spiral_fast.rollout.chosen import cache_tokens
from spiral_fast.trace import Problem


@dataclass(frozen=True)
class WorstCase:
    """Longest sequences that can come up, tokens."""

    search_prompt: int
    aggregation_prompt: int
    longest: int  # prompt and new tokens
    key: str  # the config key to lower first


def worst_case(config: Config, prompts, problems: Sequence[Problem]) -> WorstCase:
    """From the longest search prompt among `problems`, sets of candidates of full length and both L_max.

    A true bound: a quoted candidate is never longer than it was sampled, and all else does not depend on the problem.
    """
    rollout = config.rollout
    search_prompt, longest = max(
        ((len(prompts.search(problem)), problem) for problem in problems), key=lambda pair: pair[0]
    )
    # RSA evaluates with sets of its own size, whatever the training does; no prompt quotes the sets of poly_epo.
    set_size = max([largest_set(config), *(shape.set_size for shape in config.evaluate.rsa_shapes)])
    limits = [max_new_tokens(config, level) for level in range(1, 1 + max(1, len(rollout.levels)))]
    aggregation_prompt = 0
    if set_size:
        candidate = max(rollout.search_max_new_tokens, *limits)
        frame = len(prompts.aggregation(longest, [[]] * set_size))
        aggregation_prompt = frame + set_size * candidate
    totals = {
        "rollout.search_max_new_tokens": search_prompt + rollout.search_max_new_tokens,
        "rollout.levels" if rollout.levels else "rollout.aggregation_max_new_tokens": aggregation_prompt + max(limits),
    }
    key = max(totals, key=totals.get)
    return WorstCase(search_prompt, aggregation_prompt, totals[key], key)


def check_fits(
    config: Config, prompts, problems: Sequence[Problem], max_context: int, *, cuda: bool = False
) -> WorstCase:
    """Raises ConfigError when the worst case exceeds `max_context` or the cache that rollout.cache_tokens bounds, or a
    prompt its limit. `cuda`: the model lies on a GPU."""
    worst = worst_case(config, prompts, problems)
    if worst.longest > max_context:
        found, lower = getattr(config.rollout, worst.key.partition(".")[2]), "it, the other L_max or rollout.set_size"
        if worst.key == "rollout.levels":
            found, lower = [level.max_new_tokens for level in found], "max_new_tokens of a level, or set_size"
        raise ConfigError(
            f"{worst.key}: {found} cannot be used: the longest sequence ({worst.longest} tokens) would exceed the "
            f"model's context of {max_context}; lower {lower}"
        )
    cache = cache_tokens(config.rollout, cuda=cuda)
    if cache is not None and worst.longest > cache:
        raise ConfigError(
            f"rollout.cache_tokens: {cache} cannot be used: the longest sequence alone may need "
            f"{worst.longest} tokens; raise it or lower {worst.key}"
        )
    return worst
