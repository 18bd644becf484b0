"""The evaluation of a policy: pass@k, majority@k, length sweep and recursive self-aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spiral_fast.config import Config
from spiral_fast.evaluate.measure import measure
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
    """
    on_trace = counter(len(problems) * n_traces(config), progress)
    samples = Sampler(config, engine, prompts, grader, on_trace).everything(problems)
    return summarise([measure(one, config) for one in samples], config, step)


def counter(total: int, progress: Callable[[int, int], None] | None, done: int = 0) -> Callable[[], None]:
    """Counts traces from `done` on and tells `progress`."""

    def on_trace() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    return on_trace
