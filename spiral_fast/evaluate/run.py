"""The evaluation of a policy: pass@k, majority@k and recursive self-aggregation on the evaluation problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spiral_fast.config import Config
from spiral_fast.evaluate.bootstrap import LEVEL, bootstrap_interval
from spiral_fast.evaluate.majority import majority_at_k
from spiral_fast.evaluate.passk import pass_at_k
from spiral_fast.evaluate.rsa import rsa_sets
from spiral_fast.evaluate.stage import Asked, Sample, run_stage
from spiral_fast.prompts import Prompts
from spiral_fast.rewards import Grader
from spiral_fast.rollout.engine import Engine
from spiral_fast.trace import SEARCH, Problem, TraceKey


def evaluate(
    config: Config,
    engine: Engine,
    prompts: Prompts,
    grader: Grader,
    problems: Sequence[Problem],
    *,
    step: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Sample, grade and summarise: the content of eval.json.

    Stage 0 samples `evaluate.samples` independent search traces per problem: pass@k and majority@k. Its first
    `rsa.population` traces are the population of step 0; each later step aggregates `rsa.population` sets of the
    previous population, one trace per set. rsa[t] is the share of correct traces after t steps (pass@1).
    The random streams depend on the run's seed and not on `step`, which is only recorded: the same policy gives the
    same result. `progress` is called with (traces done, traces in all). Works the same for GRPO runs.
    """
    settings, rsa = config.evaluate, config.evaluate.rsa
    n_search = max(settings.samples, rsa.population) if rsa.steps else settings.samples
    done, total = 0, len(problems) * (n_search + rsa.steps * rsa.population)

    def on_trace() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    def sample(asked: list[Asked], per_problem: int) -> list[list[Sample]]:
        samples, stage = run_stage(asked, config, engine, prompts, grader, on_trace)
        stages.append(stage)
        return [samples[i : i + per_problem] for i in range(0, len(samples), per_problem)]

    stages: list[dict] = []
    asked = []
    for problem in problems:
        prompt = prompts.search(problem)
        keys = (TraceKey(problem.id, SEARCH, -1, i) for i in range(n_search))
        asked += [Asked(problem, key, prompt, config.rollout.search_max_new_tokens) for key in keys]
    search = sample(asked, n_search)  # [problem][trace]

    populations = [[traces[: rsa.population] for traces in search]] if rsa.steps else []  # [step][problem][trace]
    for level in range(1, rsa.steps + 1):
        asked = []
        for problem, population in zip(problems, populations[-1], strict=True):
            sets = rsa_sets(rsa.population, rsa.set_size, config.seed, problem.id, level)
            for s, members in enumerate(sets):
                prompt = prompts.aggregation(problem, [population[i].tokens for i in members])
                key = TraceKey(problem.id, level, s, 0)
                asked.append(Asked(problem, key, prompt, config.rollout.aggregation_max_new_tokens))
        populations.append(sample(asked, rsa.population))

    rows = []
    for p, problem in enumerate(problems):
        rows.append(_row(problem, search[p][: settings.samples], [population[p] for population in populations], config))
    return {"step": step, **_summary(rows, config), **_costs(stages), "per_problem": rows}


def _row(problem: Problem, search: list[Sample], populations: list[list[Sample]], config: Config) -> dict:
    """One problem's numbers; every metric is the mean of its column over the problems."""
    correct = [sample.correct for sample in search]
    answers = [sample.answer for sample in search]
    return {
        "id": problem.id,
        "correct": sum(correct),
        "samples": len(search),
        "pass_at_k": {str(k): pass_at_k(sum(correct), len(search), k) for k in config.evaluate.pass_at},
        "majority_at_k": {str(k): majority_at_k(answers, correct, k) for k in config.evaluate.majority_at},
        "rsa": [sum(sample.correct for sample in traces) / len(traces) for traces in populations],
        "distinct_answers": len(set(answers) - {None}),
        "search_mean_length": sum(len(sample.tokens) for sample in search) / len(search),
    }


def _summary(rows: list[dict], config: Config) -> dict:
    """Means over the problems, and an interval beside each."""
    means: dict = {"problems": len(rows), "samples": rows[0]["samples"]}
    intervals: dict = {"level": LEVEL}

    def column(values: list[float]) -> tuple[float, list[float]]:
        return float(np.mean(values)), bootstrap_interval(values, config.evaluate.bootstrap, config.seed)

    for metric in ("pass_at_k", "majority_at_k"):
        both = {k: column([row[metric][k] for row in rows]) for k in rows[0][metric]}
        means[metric] = {k: mean for k, (mean, _) in both.items()}
        intervals[metric] = {k: interval for k, (_, interval) in both.items()}
    both = [column([row["rsa"][t] for row in rows]) for t in range(len(rows[0]["rsa"]))]
    means["rsa"], intervals["rsa"] = [mean for mean, _ in both], [interval for _, interval in both]
    means["distinct_answers"], intervals["distinct_answers"] = column([row["distinct_answers"] for row in rows])
    return {**means, "intervals": intervals}


def _costs(stages: list[dict]) -> dict:
    """Stage 0 is the search, stage t the t-th aggregation step; token counts of all stages together and of each."""
    tokens = {name: sum(stage["tokens"][name] for stage in stages) for name in stages[0]["tokens"]}
    return {"search_entropy": stages[0]["entropy"], "tokens": tokens, "stages": stages}
