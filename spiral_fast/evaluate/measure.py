"""The numbers of one problem; every metric of an evaluation is the mean of such numbers over the problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spiral_fast.config import Config
from spiral_fast.evaluate.budget import Cost, costs
from spiral_fast.evaluate.majority import majority_at_k
from spiral_fast.evaluate.passk import pass_at_k
from spiral_fast.evaluate.sampling import ProblemSamples
from spiral_fast.evaluate.stage import Sample
from spiral_fast.evaluate.verification import candidate_counts
from spiral_fast.rewards.grader import CORRECT, COULD_NOT_GRADE
from spiral_fast.trace import Problem


@dataclass(frozen=True)
class Measured:
    """One problem, without its traces."""

    problem: Problem
    row: dict[str, Any]  # of `per_problem`
    search: dict[str, float]  # sums over the search traces, see `_sums`
    steps: list[list[dict[str, float]]]  # [shape][step - 1] the same over the aggregations
    costs: list[Cost]
    candidates: list[list[np.ndarray]]  # [shape][step - 1] `candidate_counts`
    gradings: int  # of traces, whole and cut
    ungradable: list[str]  # a reason for each grading that failed


def measure(samples: ProblemSamples, config: Config) -> Measured:
    settings = config.evaluate
    search = samples.search[: settings.samples]
    correct = [sample.correct for sample in search]
    answers = [sample.answer for sample in search]
    populations = [  # [shape][step][trace]
        [samples.search[: shape.population], *steps]
        for shape, steps in zip(settings.rsa_shapes, samples.rsa, strict=True)
    ]
    rsa = [[_mean([trace.correct for trace in traces]) for traces in steps] for steps in populations]
    row = {
        "id": samples.problem.id,
        "correct": sum(correct),
        "samples": len(search),
        "pass_at_k": {str(k): pass_at_k(sum(correct), len(search), k) for k in settings.pass_at},
        "majority_at_k": {str(k): majority_at_k(answers, correct, k) for k in settings.majority_at},
        "lengths": {
            str(limit): _mean([sample.at_limit[i] == CORRECT for sample in search])
            for i, limit in enumerate(settings.lengths)
        },
        "rsa": rsa[0] if rsa else [],
        "rsa_shapes": rsa,
        "distinct_answers": len(set(answers) - {None}),
        "search_mean_length": _mean([len(sample.tokens) for sample in search]),
    }
    everything = samples.search + [trace for steps in samples.rsa for traces in steps for trace in traces]
    return Measured(
        problem=samples.problem,
        row=row,
        search=_sums(samples.search),
        steps=[[_sums(traces) for traces in steps] for steps in samples.rsa],
        costs=list(costs(samples, config)),
        candidates=[
            [
                candidate_counts(before, after, shape.set_size)
                for before, after in zip(steps[:-1], steps[1:], strict=True)
            ]
            for shape, steps in zip(settings.rsa_shapes, populations, strict=True)
        ],
        gradings=sum(1 + len(sample.at_limit) for sample in everything),
        ungradable=[
            sample.reason or f"cut at one of evaluate.lengths {settings.lengths}"
            for sample in everything
            for verdict in (sample.verdict, *sample.at_limit)
            if verdict == COULD_NOT_GRADE
        ],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sums(samples: list[Sample]) -> dict[str, float]:
    return {
        "traces": len(samples),
        "prompt": sum(sample.prompt_tokens for sample in samples),
        "cached": sum(sample.cached_tokens for sample in samples),
        "computed": sum(sample.computed_tokens for sample in samples),
        "generated": sum(len(sample.tokens) for sample in samples),
        "logp": sum(sample.logp_sum for sample in samples),
        "cut": sum(sample.finish_reason == "length" for sample in samples),
        "no_answer": sum(sample.answer is None for sample in samples),
        "could_not_grade": sum(sample.verdict == COULD_NOT_GRADE for sample in samples),
    }
