"""Which evaluation belongs to a step of a run."""

from __future__ import annotations

from spiral_fast.config import Config


def evaluation_due(step: int, config: Config) -> str | None:
    """Label of the evaluation of the policy after `step`: before, step_000100, ..., after; None without."""
    if step in (0, config.learner.steps):
        return "after" if step else "before"
    every = config.evaluate.every
    return f"step_{step:06d}" if every and step % every == 0 else None
