"""What an evaluation samples: search traces, and aggregations of them in each shape of recursive self-aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spiral_fast.config import Config
from spiral_fast.evaluate.rsa import rsa_sets
from spiral_fast.evaluate.stage import SEED_STEP, Asked, Sample, run_stage
from spiral_fast.levels import max_new_tokens
from spiral_fast.prompts import Prompts
from spiral_fast.rewards import Grader
from spiral_fast.rollout.engine import Engine
from spiral_fast.trace import SEARCH, Problem, TraceKey


@dataclass(frozen=True)
class ProblemSamples:
    """Everything sampled for one problem."""

    problem: Problem
    search: list[Sample]
    rsa: list[list[list[Sample]]]  # [shape][step - 1][trace]


def n_search(config: Config) -> int:
    """Search traces of a problem: `evaluate.samples`, or the largest population where that is more."""
    return max([config.evaluate.samples, *(shape.population for shape in config.evaluate.rsa_shapes)])


def n_traces(config: Config) -> int:
    """All traces of a problem."""
    return n_search(config) + sum(shape.steps * shape.population for shape in config.evaluate.rsa_shapes)


class Sampler:
    """Samples and grades with one engine, prompts and grader. `on_trace` is called after each trace."""

    def __init__(
        self, config: Config, engine: Engine, prompts: Prompts, grader: Grader, on_trace: Callable[[], None]
    ) -> None:
        self.config, self.engine, self.prompts, self.grader = config, engine, prompts, grader
        self.on_trace = on_trace

    def everything(self, problems: Sequence[Problem]) -> list[ProblemSamples]:
        """All that `evaluate` measures, in the order of `problems`. Every shape begins with the same search traces."""
        search = self.search(problems, n_search(self.config))
        shapes = []  # [shape][step - 1][problem][trace]
        for number, shape in enumerate(self.config.evaluate.rsa_shapes):
            population = [traces[: shape.population] for traces in search]
            steps = []
            for step in range(1, shape.steps + 1):
                population = self.aggregate(problems, population, shape.set_size, step, number)
                steps.append(population)
            shapes.append(steps)
        return [
            ProblemSamples(problem, search[p], [[step[p] for step in steps] for steps in shapes])
            for p, problem in enumerate(problems)
        ]

    def search(self, problems: Sequence[Problem], n: int) -> list[list[Sample]]:
        """n search traces per problem; trace i is the same whatever n is."""
        limit, asked = self.config.rollout.search_max_new_tokens, []
        for problem in problems:
            prompt = self.prompts.search(problem)
            asked += [Asked(problem, TraceKey(problem.id, SEARCH, -1, i), prompt, limit) for i in range(n)]
        return self._run(asked, n, self.config.evaluate.lengths)

    def aggregate(
        self, problems: Sequence[Problem], populations: Sequence[list[Sample]], set_size: int, step: int, shape: int = 0
    ) -> list[list[Sample]]:
        """The population after `step` from the one before: one trace for each of as many sets. `shape` is the place
        among the shapes, which have random streams of their own."""
        config, asked = self.config, []
        size = len(populations[0])
        for problem, population in zip(problems, populations, strict=True):
            for s, members in enumerate(rsa_sets(size, set_size, config.seed, problem.id, step, SEED_STEP - shape)):
                prompt = self.prompts.aggregation(problem, [population[i].tokens for i in members])
                key = TraceKey(problem.id, step, s, 0)
                limit = max_new_tokens(config, step)
                asked.append(Asked(problem, key, prompt, limit, SEED_STEP - shape, tuple(members.tolist())))
        return self._run(asked, size)

    def _run(self, asked: list[Asked], per_problem: int, limits: Sequence[int] = ()) -> list[list[Sample]]:
        samples = run_stage(asked, self.config, self.engine, self.prompts, self.grader, self.on_trace, limits)
        return [samples[i : i + per_problem] for i in range(0, len(samples), per_problem)]
