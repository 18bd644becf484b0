"""Templated supervised examples of each generated task, as (prompt ids, completion ids)."""

from __future__ import annotations

import copy
import sys
from typing import Protocol

from spiral_fast.config import Config, ConfigError
from spiral_fast.levels import largest_set
from spiral_fast.problems import ProblemSets
from spiral_fast.prompts import Prompts
from spiral_fast.warm_start.chain_sum_examples import ChainSumExamples, Example
from spiral_fast.warm_start.parts_examples import PartsExamples


class Examples(Protocol):
    """An endless seeded supply; no example's question is a training or evaluation question."""

    def search(self) -> Example: ...

    def aggregation(self) -> Example: ...


def make_examples(config: Config, prompts: Prompts, problems: ProblemSets) -> Examples:
    task = config.problems
    set_size = largest_set(config) or config.evaluate.rsa[0].set_size  # grpo, poly_epo: in the evaluation only
    prompts = copy.copy(prompts)
    prompts.max_prompt_tokens = sys.maxsize  # that limit is for the data; chain_sum's examples have longer sums too
    used = {problem.question for problem in [*problems.train, *problems.eval]}
    if task.source == "chain_sum":
        return ChainSumExamples(config.seed, task.n_terms, task.n_digits, set_size, prompts, used)
    if task.source == "parts":
        return PartsExamples(config.seed, task.variable_length, set_size, prompts, used)
    raise ConfigError(
        f"warm_start.steps: {config.warm_start.steps} cannot be used: there are no templated answers for "
        f"problems.source: {task.source}; set it to 0"
    )
