"""The training loop, in the paper's order (arXiv 2606.23595, Algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spiral_fast.config import Config
from spiral_fast.credit import credit_of
from spiral_fast.evaluate import evaluate
from spiral_fast.evaluate.due import evaluation_due
from spiral_fast.interrupts import interrupts_held, sigterm_raises
from spiral_fast.learner.learner import Learner, StepStats
from spiral_fast.loss_rows import blamed, loss_rows
from spiral_fast.plan.here import expectation, peak_flops
from spiral_fast.problems import Draws
from spiral_fast.problems.counts import counts_in_a_line
from spiral_fast.problems.digest import digest
from spiral_fast.record.checkpoints import Checkpoints, Position
from spiral_fast.record.recorder import Recorder
from spiral_fast.record.report import write_report
from spiral_fast.record.step_metrics import learner_metrics, memory_metrics, rollout_metrics, speed_metrics
from spiral_fast.record.stopwatch import Stopwatch
from spiral_fast.rewards import NonFiniteReward, make_grader
from spiral_fast.rewards.grading import Grading
from spiral_fast.rollout.engine import NonFiniteLogits
from spiral_fast.rollout.live_batch import LiveBatch, fill_live_batch
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from spiral_fast.trace import Problem, ProblemRollout
from spiral_fast.warm_start.run import warm_start


def train(config: Config, *, resume: bool = False) -> Path:
    """Train one adapter and return the run's folder; `resume` goes on with the run that lies there.

    At Ctrl-C and SIGTERM it saves, then lets KeyboardInterrupt pass. Raises FloatingPointError after
    `learner.max_skipped_steps` steps in a row whose numbers were not finite.
    """
    parts = set_up(config, shard=True)
    prompts, problems = parts.prompts, parts.problems
    learner = Learner(config, parts.loaded)
    engine = make_engine(config, parts.loaded, run := Path(config.run_dir), lambda text: record.console.line(text))
    credit = credit_of(config)
    order = Draws(len(problems.train), config.seed, config.problems.shuffle)
    with sigterm_raises(), make_grader(config) as grader, Recorder(run, config, resume=resume) as record:
        for line in (counts_in_a_line(problems.counts), *expectation(config, parts.loaded)):
            record.console.line(line)
        known = digest([*problems.train, *problems.eval])
        checkpoints = Checkpoints(run / "checkpoints", config, known, record.console.line)
        saving = Stopwatch()
        at = saved = None  # positions between two steps: where the run stands, and that of the newest checkpoint

        def draw() -> tuple[int, Problem]:
            nonlocal next_draw
            next_draw += 1
            return next_draw - 1, problems.train[order[next_draw - 1]]

        def score(drawn) -> list[ProblemRollout]:
            """Sample, grade and credit the problems of one round; grading goes on while others are sampled."""
            with Grading(grader, config) as grading:
                with watch("rollout"), learner.rollout_weights():
                    rollouts = roll_out(engine, prompts, drawn, config, record.progress("rollout"), grading.submit)
                with watch("reward"):
                    grading.finish(rollouts)
            with watch("credit"):
                for rollout in rollouts:
                    credit(rollout)
            return rollouts

        def measure(label: str) -> None:
            engine.set_policy(learner.policy_version)  # an empty cache: a resumed run has no other
            timer, progress = Stopwatch(), record.progress(f"evaluate {label}")
            with learner.rollout_weights():
                result = evaluate(config, engine, prompts, grader, problems.eval, step=at.step, progress=progress)
            record.evaluation(label, result | timer.metrics())
            checkpoints.mark_best(record.best())

        def save() -> None:
            nonlocal saved
            if at and at != saved:
                with saving("save"):
                    checkpoints.save(at, learner)
                saved = at

        try:
            if resume:
                at = saved = checkpoints.restore(learner, record.recorded())
                record.rewind(at.step if at else 0)
                checkpoints.mark_best(record.best())
            if not at and config.warm_start.steps:
                warm_start(config, learner, prompts, problems, record.progress("warm start"))
            if resume and not engine.bitwise_resume:
                record.console.line(f"  engine {engine.name}: the run goes on from there, but not bit for bit")
            at = at or Position()
            next_draw = at.next_draw
            while True:
                label = evaluation_due(at.step, config)
                if label and not record.has_evaluation(label):
                    save()
                    measure(label)
                if at.step == config.learner.steps:
                    break
                watch, counts = Stopwatch(), replace(engine.counts)
                batch, failed = LiveBatch(), []  # problems whose numbers are not finite
                with watch("swap"):
                    engine.set_policy(learner.policy_version)  # no key or value of an older policy is read again
                try:
                    fill_live_batch(
                        batch,
                        iter(draw, None),
                        score,
                        live_problems=config.batch.live_problems,
                        round_problems=config.batch.round_problems or config.batch.live_problems,
                        max_rounds=config.batch.max_rounds,
                    )
                    engine.set_policy(learner.policy_version)  # frees the cache for the learner
                    with watch("learn"):
                        stats = learner.accumulate(loss_rows(batch.live, config))
                    failed = blamed(stats, batch.live)
                except (NonFiniteLogits, NonFiniteReward) as error:
                    engine.abandon()
                    stats = StepStats(policy_version=learner.policy_version, skipped_reason=str(error))
                    failed = error.problems
                with interrupts_held():  # an update and its record belong together
                    here, at = at, None
                    learner.update(stats)
                    metrics = rollout_metrics(batch, engine.counts - counts) | learner_metrics(stats)
                    metrics |= {"skipped_problems": failed, "problems/epoch": next_draw / len(problems.train)}
                    record.traces(here.step + 1, batch.drawn())
                    metrics |= speed_metrics(stats, watch.seconds.get("learn"), peak_flops(config, learner.device))
                    metrics |= watch.metrics() | memory_metrics() | {"time/save": saving.seconds.pop("save", 0.0)}
                    metrics |= {"time/grader_restarts": grader.restarts}
                    record.metrics(here.step + 1, metrics)
                    at = Position(here.step + 1, next_draw, here.failed_in_a_row + 1 if failed else 0)
                if at.step % config.record.save_every == 0:
                    save()
                stop_when_numbers_fail(at, stats, failed, config)
        finally:
            save()
            engine.close()
    write_report(run)
    return run


def stop_when_numbers_fail(at: Position, stats: StepStats, failed: list[str], config: Config) -> None:
    """Raise FloatingPointError after learner.max_skipped_steps such steps in a row."""
    if at.failed_in_a_row >= config.learner.max_skipped_steps:
        raise FloatingPointError(
            f"step {at.step}: {stats.skipped_reason} (problems {', '.join(failed[:5])}); {at.failed_in_a_row} steps "
            "in a row were skipped for numbers that are not finite (learner.max_skipped_steps); earlier checkpoints "
            "are whole: lower learner.learning_rate, or look at these problems in the traces"
        )
