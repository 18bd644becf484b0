"""`train --replay TRACES`: the learner alone on stored traces, to debug it without engine, grader and evaluation."""

from __future__ import annotations

from pathlib import Path

from spiral_fast.config import Config
from spiral_fast.credit import credit_of
from spiral_fast.learner.learner import Learner
from spiral_fast.loss_rows import blamed, loss_rows
from spiral_fast.plan.here import peak_flops
from spiral_fast.problems.digest import digest
from spiral_fast.record.checkpoints import Checkpoints, Position
from spiral_fast.record.files import write_json
from spiral_fast.record.recorder import Recorder
from spiral_fast.record.report import write_report
from spiral_fast.record.step_metrics import learner_metrics, memory_metrics, rollout_metrics, speed_metrics
from spiral_fast.record.stopwatch import Stopwatch
from spiral_fast.record.trace_store import read_rollouts
from spiral_fast.replay_checks import check_shape, check_tokens, trace_files
from spiral_fast.rollout.live_batch import LiveBatch
from spiral_fast.set_up import set_up
from spiral_fast.warm_start.run import warm_start


def replay(config: Config, traces: Path) -> Path:
    """One learner step per stored step, its credits computed anew from the stored rewards, in a new run; its folder.

    With the config of the run that stored them the same adapter comes out, on a CPU bit for bit (up to a step that run
    skipped because its engine or grader failed). `traces` is a run's folder, its folder of traces, or one file. Raises
    ConfigError.
    """
    files = trace_files(traces)
    parts = set_up(config)
    for file in files.values():
        check_tokens(file, parts.loaded)
    first = next(iter(files.values()))  # whose flaws are found before a folder is made
    for rollout in read_rollouts(first):
        check_shape(rollout, config, first)
    learner, credit = Learner(config, parts.loaded), credit_of(config)
    run = Path(config.run_dir)
    with Recorder(run, config) as record:
        write_json(run / "replay.json", {"traces": str(traces)})
        known = digest([*parts.problems.train, *parts.problems.eval])
        checkpoints = Checkpoints(run / "checkpoints", config, known, record.console.line)
        if config.warm_start.steps:
            warm_start(config, learner, parts.prompts, parts.problems, record.progress("warm start"))
        next_draw = 0
        for step, file in files.items():
            watch, batch = Stopwatch(), LiveBatch()
            with watch("read"):
                rollouts = read_rollouts(file)
            with watch("credit"):
                for rollout in rollouts:
                    check_shape(rollout, config, file)
                    for trace in rollout.traces():
                        trace.credit, trace.gated = 0.0, False
                    credit(rollout)
                    batch.add(rollout, config.batch.live_problems)
                    next_draw = rollout.draw + 1
            with watch("learn"):
                stats = learner.step(loss_rows(batch.live, config))
            metrics = rollout_metrics(batch, None) | learner_metrics(stats)
            metrics |= speed_metrics(stats, watch.seconds["learn"], peak_flops(config, learner.device))
            record.traces(step, batch.drawn())
            metrics["skipped_problems"] = blamed(stats, batch.live)
            record.metrics(step, metrics | watch.metrics() | memory_metrics())
        checkpoints.save(Position(step, next_draw), learner)
    write_report(run)
    return run
