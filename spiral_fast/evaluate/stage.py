"""One stage of an evaluation: sample a list of requests with the engine and grade the completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from spiral_fast.config import Config
from spiral_fast.prompts import Prompts
from spiral_fast.rewards import Grader, check_ungradable
from spiral_fast.rollout.engine import Engine, Request, request_seed
from spiral_fast.trace import Problem, TraceKey

SEED_STEP = -1  # in place of a training draw (>= 0): evaluations share their random streams, training has none of them


@dataclass(frozen=True)
class Sample:
    """A graded completion."""

    tokens: list[int]
    logp_sum: float  # sum of the log-probs of `tokens` at the sampling temperature
    finish_reason: str
    answer: str | None  # what the grader extracted
    verdict: str  # "correct" | "wrong" | "could_not_grade"

    @property
    def correct(self) -> bool:
        return self.verdict == "correct"


@dataclass(frozen=True)
class Asked:
    problem: Problem
    key: TraceKey
    prompt: list[int]
    max_new_tokens: int


def run_stage(
    asked: list[Asked], config: Config, engine: Engine, prompts: Prompts, grader: Grader, on_trace: Callable[[], None]
) -> tuple[list[Sample], dict]:
    """The samples in the order of `asked`, and what the stage cost and looked like.

    Only completions are graded, never prompts. Raises PromptTooLong from the engine and TooManyUngradable.
    """
    before = replace(engine.counts)
    tickets = {}
    for i, item in enumerate(asked):
        seed = request_seed(config.seed, SEED_STEP, item.key)
        request = Request(item.key, tuple(item.prompt), item.max_new_tokens, config.rollout.temperature, seed)
        tickets[engine.add(request)] = i
    completions = [None] * len(asked)
    while tickets:
        for ticket, completion in engine.step():
            completions[tickets.pop(ticket)] = completion
            on_trace()
    texts = [prompts.decode(completion.tokens) for completion in completions]
    items = [(a.problem, text, c.finish_reason) for a, text, c in zip(asked, texts, completions, strict=True)]
    verdicts = grader.grade(items)
    check_ungradable(items, verdicts, config)
    samples = [
        Sample(c.tokens, float(np.sum(c.logp, dtype=np.float64)), c.finish_reason, v.answer, v.verdict)
        for c, v in zip(completions, verdicts, strict=True)
    ]
    return samples, {**_describe(samples), "tokens": asdict(engine.counts - before)}


def _describe(samples: list[Sample]) -> dict:
    def share(hits) -> float:
        return sum(hits) / len(samples)

    n_tokens = sum(len(sample.tokens) for sample in samples)
    return {
        "traces": len(samples),
        "mean_length": n_tokens / len(samples),
        # nats per token; a ratio of two random sums: consistent, with a bias that falls as 1 / traces
        "entropy": -sum(sample.logp_sum for sample in samples) / n_tokens,
        "cut_share": share(sample.finish_reason == "length" for sample in samples),
        "no_answer_share": share(sample.answer is None for sample in samples),
        "could_not_grade_share": share(sample.verdict == "could_not_grade" for sample in samples),
    }
