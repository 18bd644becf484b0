"""Two-stage rollout (paper §3.2, Algorithm 1 lines 1-7): search traces, sets of them, aggregation traces.

A problem's aggregations are queued as soon as its own search traces are complete; problems do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit.sets import sample_sets
from spiral_fast.rollout.engine import Completion, Engine, Losses, Request, RequestsLost, request_seed
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

    A problem of which the engine lost requests is drawn again as a whole, under the same draw number: `on_trace` is
    called anew for its traces, and those it was called for before belong to no rollout. Raises EngineFailed when that
    happens to one problem too often.
    """
    settings = config.rollout
    n_traces = settings.n_search + settings.n_sets * settings.n_aggregations
    rollouts = [ProblemRollout(problem, draw, [], np.zeros((0, 0), np.int64), []) for draw, problem in drawn]
    waiting: dict[int, tuple[ProblemRollout, Request]] = {}  # by ticket
    losses = Losses()

    def add(rollout: ProblemRollout, key: TraceKey, prompt: list[int], max_new_tokens: int) -> None:
        seed = request_seed(config.seed, rollout.draw, key)
        request = Request(key, tuple(prompt), max_new_tokens, settings.temperature, seed)
        waiting[engine.add(request)] = rollout, request

    def search(rollout: ProblemRollout) -> None:
        rollout.search = [None] * settings.n_search
        rollout.sets, rollout.aggregation = np.zeros((0, 0), np.int64), []
        prompt = prompts.search(rollout.problem)
        for i in range(settings.n_search):
            add(rollout, TraceKey(rollout.problem.id, SEARCH, -1, i), prompt, settings.search_max_new_tokens)

    def aggregate(rollout: ProblemRollout) -> None:
        rollout.sets = draw_sets(rollout, config)
        rollout.aggregation = [[None] * settings.n_aggregations for _ in rollout.sets]
        for k, members in enumerate(rollout.sets):
            if not settings.n_aggregations:
                return
            prompt = prompts.aggregation(rollout.problem, [rollout.search[i].tokens for i in members])
            for j in range(settings.n_aggregations):
                key = TraceKey(rollout.problem.id, AGGREGATION, k, j)
                add(rollout, key, prompt, settings.aggregation_max_new_tokens)

    for rollout in rollouts:
        search(rollout)
    done = 0
    while waiting:
        try:
            finished = engine.step()
        except RequestsLost as error:
            lost = {rollout.draw: rollout for rollout, _ in map(waiting.pop, error.tickets)}
            losses.add((rollout.problem.id for rollout in lost.values()), error)
            for rollout in lost.values():
                done -= sum(trace is not None for trace in rollout.traces())
                search(rollout)
            finished = []
        for ticket, completion in finished:
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
                aggregate(rollout)
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
