"""The staged rollout (paper §3.2, Algorithm 1 lines 1-7): search traces, sets of them, aggregation traces; with
`rollout.levels` sets of those, their aggregation traces, and so on.

A problem's next level is queued as soon as its own level below is complete; problems do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit.sets import sample_sets
from spiral_fast.levels import levels_of, max_new_tokens, populations
from spiral_fast.rollout.engine import Completion, Engine, Losses, Request, RequestsLost, request_seed
from spiral_fast.trace import SEARCH, Aggregated, Problem, ProblemRollout, Trace, TraceKey


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
    settings, levels = config.rollout, levels_of(config)
    n_traces = sum(populations(settings.n_search, levels))
    rollouts = [ProblemRollout(problem, draw, [], np.zeros((0, 0), np.int64), []) for draw, problem in drawn]
    waiting: dict[int, tuple[ProblemRollout, Request]] = {}  # by ticket
    losses = Losses()

    def add(rollout: ProblemRollout, key: TraceKey, prompt: list[int]) -> None:
        seed = request_seed(config.seed, rollout.draw, key)
        request = Request(key, tuple(prompt), max_new_tokens(config, key.level), settings.temperature, seed)
        waiting[engine.add(request)] = rollout, request

    def search(rollout: ProblemRollout) -> None:
        rollout.search = [None] * settings.n_search
        rollout.sets, rollout.aggregation, rollout.higher = np.zeros((0, 0), np.int64), [], []
        prompt = prompts.search(rollout.problem)
        for i in range(settings.n_search):
            add(rollout, TraceKey(rollout.problem.id, SEARCH, -1, i), prompt)

    def aggregate(rollout: ProblemRollout, level: int) -> None:
        below = rollout.search if level == 1 else rollout.levels[level - 2].population()
        sets, n_aggregations = draw_sets(rollout, config, level), levels[level - 1].n_aggregations
        stage = Aggregated(sets, [[None] * n_aggregations for _ in sets])
        rollout.add_level(stage)
        for k, members in enumerate(stage.members()):
            if not n_aggregations:
                return
            prompt = prompts.aggregation(rollout.problem, [below[i].tokens for i in members])
            for j in range(n_aggregations):
                add(rollout, TraceKey(rollout.problem.id, level, k, j), prompt)

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
            level, k, index = trace.key[1:]
            (rollout.search if level == SEARCH else rollout.levels[level - 1].groups[k])[index] = trace
            stage = rollout.search if level == SEARCH else rollout.levels[level - 1].population()
            if level < len(levels) and all(stage):
                aggregate(rollout, level + 1)
        if progress:
            progress(done, len(rollouts) * n_traces)
    return rollouts


def draw_sets(rollout: ProblemRollout, config: Config, level: int = 1) -> np.ndarray:
    """The sets of one level of one problem, (K, n) as `Aggregated.sets`; random from (run seed, draw number, level)."""
    settings, levels = config.rollout, levels_of(config)
    one, population = levels[level - 1], populations(settings.n_search, levels)[level - 1]
    order = settings.member_order if level == len(levels) else "index"
    rng = np.random.default_rng([config.seed, rollout.draw, *([level] if level > 1 else [])])
    sets = np.full((one.all_sets, max(one.set_sizes)), -1, np.int64)
    for i, size in enumerate(one.set_sizes):
        drawn = sample_sets(one.sampler, population, size, one.n_sets, rng, member_order=order)
        sets[i * one.n_sets : (i + 1) * one.n_sets, :size] = drawn
    return sets


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
