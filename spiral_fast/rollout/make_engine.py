"""Which engine a run uses."""

from __future__ import annotations

from spiral_fast.batch_invariant import check_possible
from spiral_fast.config import Config, ConfigError
from spiral_fast.rollout.engine import Engine
from spiral_fast.rollout.radix.engine import RadixEngine


def make_engine(config: Config, loaded) -> Engine:
    """The engine of `rollout.engine` over the learner's own model (`loaded`: a LoadedModel)."""
    rollout = config.rollout
    if rollout.batch_invariant:
        try:
            check_possible(loaded.causal_lm)
        except ValueError as error:
            raise ConfigError(f"rollout.batch_invariant: true cannot be used: {error}") from None
    return RadixEngine(
        loaded.causal_lm,
        loaded.eos_token_ids,
        max_context=loaded.max_context,
        max_running=rollout.max_running,
        prefill_chunk=rollout.prefill_chunk,
        cache_tokens=rollout.cache_tokens,
        watch_weights=not config.learner.fsdp,
        batch_invariant=rollout.batch_invariant,
    )
