"""The evaluation of a policy: pass@k, majority@k, length sweep and recursive self-aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spiral_fast import ranks
from spiral_fast.config import Config
from spiral_fast.evaluate.measure import Measured, measure
from spiral_fast.evaluate.sampling import Sampler, n_traces
from spiral_fast.evaluate.summary import summarise
from spiral_fast.prompts import Prompts
from spiral_fast.rewards import Grader
from spiral_fast.rollout.engine import Engine
from spiral_fast.trace import Problem


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

    Stage 0 samples `evaluate.samples` independent search traces per problem: pass@k, majority@k, and pass@1 at each of
    `evaluate.lengths` from their prefixes. Its first `population` traces are step 0 of each shape of `evaluate.rsa`;
    each later step aggregates as many sets of the previous population, one trace per set. rsa[t] is the share of
    correct traces after t steps (pass@1). Nothing is sampled twice.
    The random streams depend on the run's seed and not on `step`, which is only recorded: the same policy gives the
    same result. `progress` is called with (traces done, traces in all). Works the same for GRPO runs.

    On several ranks each samples its share of the problems, and all return the whole.
    """

    def share(mine: list[Problem]) -> list[Measured]:
        on_trace = counter(len(mine) * n_traces(config), progress)
        return [measure(one, config) for one in Sampler(config, engine, prompts, grader, on_trace).everything(mine)]

    return summarise(ranks.share_out(share, problems, among=engine.asked_by), config, step)


def counter(total: int, progress: Callable[[int, int], None] | None, done: int = 0) -> Callable[[], None]:
    """Counts traces from `done` on and tells `progress`."""

    def on_trace() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    return on_trace
