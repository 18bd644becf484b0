"""The supervised warm start of a run: a few steps on templated answers before the first evaluation."""

from __future__ import annotations

from collections.abc import Callable

from spiral_fast.config import Config
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.problems import ProblemSets
from spiral_fast.prompts import Prompts
from spiral_fast.trace import AGGREGATION, SEARCH
from spiral_fast.warm_start.examples import make_examples


def warm_start(
    config: Config,
    learner: Learner,
    prompts: Prompts,
    problems: ProblemSets,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """`warm_start.steps` supervised steps at a rate that falls linearly to 0; the cross-entropy (nats) of each."""
    settings = config.warm_start
    examples = make_examples(config, prompts, problems)
    losses = []
    for step in range(settings.steps):
        rows = [_row(examples.search(), SEARCH) for _ in range(settings.search_examples)]
        rows += [_row(examples.aggregation(), AGGREGATION) for _ in range(settings.aggregation_examples)]
        losses.append(learner.supervised_step(rows, settings.learning_rate * (1 - step / settings.steps)))
        if progress:
            progress(step + 1, settings.steps)
    return losses


def _row(example: tuple[list[int], list[int]], level: int) -> Row:
    prompt, completion = example
    return Row(prompt, completion, rollout_logp=None, credit=0.0, weight=0.0, level=level)
