"""The training loop, in the paper's order (arXiv 2606.23595, Algorithm 1)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from spiral_fast.config import Config
from spiral_fast.credit import credit_of, search_weight
from spiral_fast.evaluate import evaluate
from spiral_fast.interrupts import interrupts_held
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.problems import Draws
from spiral_fast.record.recorder import Recorder
from spiral_fast.record.report import write_report
from spiral_fast.record.step_metrics import learner_metrics, memory_metrics, rollout_metrics
from spiral_fast.record.stopwatch import Stopwatch
from spiral_fast.rewards import check_ungradable, make_grader
from spiral_fast.rollout.live_batch import fill_live_batch
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from spiral_fast.trace import AGGREGATION, SEARCH, ProblemRollout
from spiral_fast.warm_start.run import warm_start


def train(config: Config) -> Path:
    """Train one adapter and return the run's folder. At Ctrl-C it saves, then lets KeyboardInterrupt pass."""
    parts = set_up(config)
    prompts, problems, batch_size = parts.prompts, parts.problems, config.batch.live_problems
    learner = Learner(config, parts.loaded)
    engine = make_engine(config, parts.loaded)
    credit = credit_of(config)
    order = Draws(len(problems.train), config.seed, config.problems.shuffle)
    draws = ((draw, problems.train[order[draw]]) for draw in itertools.count())
    run = Path(config.run_dir)
    with make_grader(config) as grader, Recorder(run, config) as record:

        def score(drawn) -> list[ProblemRollout]:
            """Sample, grade and credit the problems of one round."""
            with watch("rollout"), learner.rollout_weights():
                rollouts = roll_out(engine, prompts, drawn, config, record.progress("rollout"))
            with watch("reward"):
                grade(rollouts, grader, config)
            with watch("credit"):
                for rollout in rollouts:
                    credit(rollout)
            return rollouts

        def measure(label: str, step: int) -> None:
            engine.set_policy(learner.policy_version)
            on_progress, timer = record.progress(f"evaluate {label}"), Stopwatch()
            with learner.rollout_weights():
                result = evaluate(config, engine, prompts, grader, problems.eval, step=step, progress=on_progress)
            record.evaluation(label, result | timer.metrics())

        def save() -> None:
            folder = run / "checkpoints" / f"step_{step:06d}"
            if not folder.exists():
                with interrupts_held():  # also a second Ctrl-C leaves a whole checkpoint
                    learner.save(folder)

        step = 0
        try:
            if config.warm_start.steps:
                warm_start(config, learner, prompts, problems, record.progress("warm start"))
            measure("before", 0)
            while step < config.learner.steps:
                watch, counts = Stopwatch(), replace(engine.counts)
                batch = fill_live_batch(
                    draws,
                    score,
                    live_problems=batch_size,
                    round_problems=config.batch.round_problems or batch_size,
                    max_rounds=config.batch.max_rounds,
                )
                engine.set_policy(learner.policy_version)  # frees the cache for the learner
                with watch("learn"):
                    stats = learner.accumulate(loss_rows(batch.live, config))
                with interrupts_held():  # an update and its record belong together
                    learner.update(stats)
                    engine.set_policy(learner.policy_version)  # no key or value of the old policy is read again
                    step += 1
                    metrics = rollout_metrics(batch, engine.counts - counts) | learner_metrics(stats)
                    record.metrics(step, metrics | watch.metrics() | memory_metrics())
                    record.traces(step, batch.drawn())
                if config.evaluate.every and step % config.evaluate.every == 0 and step < config.learner.steps:
                    measure(f"step_{step:06d}", step)
                if step % config.record.checkpoint_every == 0:
                    save()
            measure("after", step)
        finally:
            save()
            engine.close()
    write_report(run)
    return run


def grade(rollouts: list[ProblemRollout], grader, config: Config) -> None:
    """Fill reward and verdict of every trace from its completion alone. SPIRAL only records the rewards of search."""
    traces = [(rollout.problem, trace) for rollout in rollouts for trace in rollout.traces()]
    items = [(problem, trace.text, trace.finish_reason) for problem, trace in traces]
    verdicts = grader.grade(items)
    check_ungradable(items, verdicts, config)
    for (_, trace), verdict in zip(traces, verdicts, strict=True):
        trace.reward, trace.verdict, trace.answer = verdict.reward, verdict.verdict, verdict.answer


def loss_rows(live: list[ProblemRollout], config: Config) -> list[Row]:
    """One row per trace; weights make the loss (1/|B|) sum over the live problems, their traces and tokens."""
    weight = 1.0 / max(1, len(live))
    weights = {SEARCH: weight * search_weight(config), AGGREGATION: weight}
    return [
        Row(trace.prompt, trace.tokens, trace.logp, trace.credit, weights[trace.key.level], trace.key.level)
        for rollout in live
        for trace in rollout.traces()
    ]
