"""One stage of an evaluation: sample a list of requests with the engine and grade each completion as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from spiral_fast.config import Config
from spiral_fast.interrupts import result_of
from spiral_fast.prompts import Prompts
from spiral_fast.rewards.grader import CORRECT, Grader, Verdict, check_finite
from spiral_fast.rollout.engine import Completion, Engine, Losses, Request, RequestsLost, request_seed
from spiral_fast.trace import Problem, TraceKey

SEED_STEP = -1  # in place of a training draw (>= 0): evaluations share their random streams, training has none of them


@dataclass(frozen=True)
class Sample:
    """A graded completion."""

    key: TraceKey
    members: list[int]  # the quoted candidates, indices into the population before; [] for a search trace
    tokens: list[int]
    text: str
    logp_sum: float  # sum of the log-probs of `tokens` at the sampling temperature
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # of prompt_tokens
    computed_tokens: int  # of prompt_tokens
    answer: str | None  # what the grader extracted
    verdict: str  # "correct" | "wrong" | "could_not_grade"
    reason: str  # why it could not be graded
    at_limit: list[str]  # verdicts of the trace cut at each of `evaluate.lengths`; [] for an aggregation

    @property
    def correct(self) -> bool:
        return self.verdict == CORRECT


@dataclass(frozen=True)
class Asked:
    problem: Problem
    key: TraceKey
    prompt: list[int]
    max_new_tokens: int
    occasion: int = SEED_STEP
    members: tuple[int, ...] = ()


def run_stage(
    asked: list[Asked],
    config: Config,
    engine: Engine,
    prompts: Prompts,
    grader: Grader,
    on_trace: Callable[[], None],
    limits: Sequence[int] = (),
) -> list[Sample]:
    """The samples in the order of `asked`. Only completions are graded, never prompts, while others are being sampled.

    Each trace is also graded as cut at each of `limits` tokens. The engine draws each token from the trace's seed and
    its position alone, so that this prefix is what sampling with that max_new_tokens gives.

    A problem of which the engine lost requests is sampled again as a whole; `on_trace` is called once a sample.

    Raises PromptTooLong and EngineFailed from the engine, and NonFiniteReward.
    """
    tickets: dict[int, int] = {}

    def add(i: int) -> None:
        item = asked[i]
        seed = request_seed(config.seed, item.occasion, item.key)
        request = Request(item.key, tuple(item.prompt), item.max_new_tokens, config.rollout.temperature, seed)
        tickets[engine.add(request)] = i

    for i in range(len(asked)):
        add(i)
    done: list = [None] * len(asked)
    losses = Losses()
    while tickets:
        try:
            finished = engine.step()
        except RequestsLost as error:
            lost = {asked[tickets.pop(ticket)].problem.id for ticket in error.tickets}
            losses.add(lost, error)
            for i in (i for i, item in enumerate(asked) if item.problem.id in lost):
                add(i)
            finished = []
        for ticket, completion in finished:
            i = tickets.pop(ticket)
            if done[i] is None:
                on_trace()
            done[i] = completion, *_submit(asked[i].problem, completion, prompts, grader, limits)
    return [_sample(item, *graded) for item, graded in zip(asked, done, strict=True)]


def _submit(
    problem: Problem, completion: Completion, prompts: Prompts, grader: Grader, limits: Sequence[int]
) -> tuple[str, Future[Verdict], list[Future[Verdict]]]:
    """The text, its verdict to come, and those of the cut ones; a limit that cuts nothing has the trace's verdict."""
    text = prompts.decode(completion.tokens)
    whole = grader.submit(problem, text, completion.finish_reason)
    cut = [
        grader.submit(problem, prompts.decode(completion.tokens[:limit]), "length")
        if limit < len(completion.tokens)
        else whole
        for limit in limits
    ]
    return text, whole, cut


def _sample(
    item: Asked, completion: Completion, text: str, whole: Future[Verdict], cut: list[Future[Verdict]]
) -> Sample:
    verdict = result_of(whole)
    check_finite([(item.problem, text, completion.finish_reason)], [verdict])
    return Sample(
        key=item.key,
        members=list(item.members),
        tokens=completion.tokens,
        text=text,
        logp_sum=float(np.sum(completion.logp, dtype=np.float64)),
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        computed_tokens=completion.computed_tokens,
        answer=verdict.answer,
        verdict=verdict.verdict,
        reason=verdict.reason,
        at_limit=[result_of(future).verdict for future in cut],
    )
