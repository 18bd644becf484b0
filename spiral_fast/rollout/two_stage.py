"""Two-stage rollout (paper §3.2, Algorithm 1 lines 1-7): search traces, sets of them, aggregation traces.

A problem's aggregations are queued as soon as its own search traces are complete; problems do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit.sets import sample_sets
from spiral_fast.rollout.engine import Completion, Engine, Request, request_seed
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey


def roll_out(
    engine: Engine,
    prompts,
    drawn: Sequence[tuple[int, Problem]],
    config: Config,
    progress: Callable[[int, int], None] | None = None,
    on_trace: Callable[[Problem, Trace], None] | None = None,
) -> list[ProblemRollout]:
    """Sample every trace of the drawn problems; results in the order of `drawn` ((draw number, problem) pairs).

    Seeds derive from (run seed, draw number, trace key) alone. `progress` is called with (traces done, traces in all),
    `on_trace` with each trace as soon as it is complete. With n_aggregations 0 the sets are drawn and nothing is
    aggregated.
    """
    settings = config.rollout
    n_traces = settings.n_search + settings.n_sets * settings.n_aggregations
    rollouts = [
        ProblemRollout(problem, draw, [None] * settings.n_search, np.zeros((0, 0), np.int64), [])
        for draw, problem in drawn
    ]
    waiting: dict[int, tuple[ProblemRollout, Request]] = {}  # by ticket

    def add(rollout: ProblemRollout, key: TraceKey, prompt: list[int], max_new_tokens: int) -> None:
        seed = request_seed(config.seed, rollout.draw, key)
        request = Request(key, tuple(prompt), max_new_tokens, settings.temperature, seed)
        waiting[engine.add(request)] = rollout, request

    for rollout in rollouts:
        prompt = prompts.search(rollout.problem)
        for i in range(settings.n_search):
            add(rollout, TraceKey(rollout.problem.id, SEARCH, -1, i), prompt, settings.search_max_new_tokens)

    done = 0
    while waiting:
        for ticket, completion in engine.step():
            rollout, request = waiting.pop(ticket)
            trace = _trace(request, completion, prompts)
            done += 1
            if on_trace:
                on_trace(rollout.problem, trace)
            if trace.key.level == AGGREGATION:
                rollout.aggregation[trace.key.set][trace.key.index] = trace
                continue
            rollout.search[trace.key.index] = trace
            if settings.n_sets and all(rollout.search):
                rollout.sets = draw_sets(rollout, config)
                rollout.aggregation = [[None] * settings.n_aggregations for _ in rollout.sets]
                if not settings.n_aggregations:
                    continue
                for k, members in enumerate(rollout.sets):
                    prompt = prompts.aggregation(rollout.problem, [rollout.search[i].tokens for i in members])
                    for j in range(settings.n_aggregations):
                        key = TraceKey(rollout.problem.id, AGGREGATION, k, j)
                        add(rollout, key, prompt, settings.aggregation_max_new_tokens)
        if progress:
            progress(done, len(rollouts) * n_traces)
    return rollouts


def draw_sets(rollout: ProblemRollout, config: Config) -> np.ndarray:
    """The K sets of one problem, (K, n) indices of search traces; random from (run seed, draw number) alone."""
    settings = config.rollout
    rng = np.random.default_rng([config.seed, rollout.draw])
    return sample_sets(
        settings.set_sampler,
        settings.n_search,
        settings.set_size,
        settings.n_sets,
        rng,
        member_order=settings.member_order,
    )


def _trace(request: Request, completion: Completion, prompts) -> Trace:
    return Trace(
        request.key,
        list(request.prompt),
        completion.tokens,
        completion.logp,
        completion.finish_reason,
        completion.policy_version,
        prompts.decode(completion.tokens),
    )
