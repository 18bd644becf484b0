"""When a run whose steps are skipped for numbers that are not finite stops."""

from __future__ import annotations

from spiral_fast.config import Config
from spiral_fast.learner.step_stats import StepStats
from spiral_fast.record.checkpoints import Position


def stop_when_numbers_fail(at: Position, stats: StepStats, failed: list[str], config: Config) -> None:
    """Raise FloatingPointError after learner.max_skipped_steps such steps in a row."""
    if at.failed_in_a_row >= config.learner.max_skipped_steps:
        raise FloatingPointError(
            f"step {at.step}: {stats.skipped_reason} (problems {', '.join(failed[:5])}); {at.failed_in_a_row} steps "
            "in a row were skipped for numbers that are not finite (learner.max_skipped_steps); earlier checkpoints "
            "are whole: lower learner.learning_rate, or look at these problems in the traces"
        )
