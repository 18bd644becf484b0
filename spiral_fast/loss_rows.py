"""From credited problems to the learner's rows, and back from a row to its problem."""

from __future__ import annotations

from spiral_fast.config import Config
from spiral_fast.credit import level_weights
from spiral_fast.learner.learner import Row, StepStats
from spiral_fast.trace import ProblemRollout


def loss_rows(live: list[ProblemRollout], config: Config) -> list[Row]:
    """One row per trace; weights make the loss (1/|B|) sum over the live problems, their traces and tokens."""
    weight = 1.0 / max(1, len(live))
    weights = [weight * factor for factor in level_weights(config)]
    return [
        Row(trace.prompt, trace.tokens, trace.logp, trace.credit, weights[trace.key.level], trace.key.level)
        for rollout in live
        for trace in rollout.traces()
    ]


def blamed(stats: StepStats, live: list[ProblemRollout]) -> list[str]:
    """Ids of the problems for whose rows the learner skips the step."""
    problem_of = [rollout.problem.id for rollout in live for _ in rollout.traces()]  # in the order of `loss_rows`
    return list(dict.fromkeys(problem_of[row] for row in stats.skipped_rows))
