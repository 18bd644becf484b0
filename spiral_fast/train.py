"""The training loop, in the paper's order (arXiv 2606.23595, Algorithm 1)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from spiral_fast import ranks
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
from spiral_fast.record.of_rank import recording
from spiral_fast.record.report import write_report
from spiral_fast.record.step_metrics import learner_metrics, memory_metrics, rollout_metrics, speed_metrics
from spiral_fast.record.stopwatch import Stopwatch
from spiral_fast.rewards import NonFiniteReward, Verdict, make_grader
from spiral_fast.rewards.grading import Grading, check_graded
from spiral_fast.rollout.engine import NonFiniteLogits
from spiral_fast.rollout.live_batch import LiveBatch, fill_live_batch
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from spiral_fast.skipped_steps import stop_when_numbers_fail
from spiral_fast.trace import Problem, ProblemRollout
from spiral_fast.warm_start.run import warm_start


def train(config: Config, *, resume: bool = False) -> Path:
    """Train one adapter and return the run's folder; `resume` goes on with the run that lies there.

    Under torchrun all ranks are here with the same draws, rows and adapter; spiral_fast/ranks.py says where they meet.
    At Ctrl-C and SIGTERM it saves, then lets KeyboardInterrupt pass. Raises FloatingPointError after
    `learner.max_skipped_steps` steps in a row whose numbers were not finite.
    """
    parts = set_up(config, trains=True)
    prompts, problems = parts.prompts, parts.problems
    learner = Learner(config, parts.loaded)
    engine = make_engine(config, parts.loaded, run := Path(config.run_dir), lambda text: record.console.line(text))
    credit, order = credit_of(config), Draws(len(problems.train), config.seed, config.problems.shuffle)
    with sigterm_raises(), make_grader(config) as grader, recording(config, resume=resume) as record, closing(engine):
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

        def set_policy() -> None:
            """The engine forgets its cache: no key or value of an older policy is read again, none kept for nobody."""
            ranks.on_each(lambda: engine.set_policy(learner.policy_version), among=engine.asked_by)

        def score_share(drawn) -> list[tuple[ProblemRollout, list[Verdict]]]:
            """Sample, grade and credit problems; grading goes on while others are sampled."""
            with Grading(grader) as grading:
                with watch("rollout"):
                    rollouts = roll_out(engine, prompts, drawn, config, record.progress("rollout"), grading.submit)
                with watch("reward"):
                    verdicts = grading.finish(rollouts)
            with watch("credit"):
                for rollout in rollouts:
                    credit(rollout)
            return list(zip(rollouts, verdicts, strict=True))

        def score(drawn) -> list[ProblemRollout]:
            """The problems of one round, shared out among the ranks."""
            scored = ranks.share_out(score_share, drawn, among=engine.asked_by)
            check_graded(scored, config)
            return [rollout for rollout, _ in scored]

        def measure(label: str) -> None:
            timer, progress = Stopwatch(), record.progress(f"evaluate {label}")
            with learner.rollout_weights():
                set_policy()
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
                if (label := evaluation_due(at.step, config)) and not ranks.from_first(record.has_evaluation, label):
                    save()
                    measure(label)
                if at.step == config.learner.steps:
                    break
                watch, counts = Stopwatch(), replace(engine.counts)
                batch, failed = LiveBatch(), []  # problems whose numbers are not finite
                try:
                    with learner.rollout_weights():
                        with watch("swap"):
                            set_policy()
                        fill_live_batch(batch, iter(draw, None), score, config.batch)
                        set_policy()
                    with watch("learn"):
                        stats = learner.accumulate(loss_rows(batch.live, config))
                    failed = blamed(stats, batch.live)
                except (NonFiniteLogits, NonFiniteReward) as error:
                    engine.abandon()
                    stats = StepStats(policy_version=learner.policy_version, skipped_reason=str(error))
                    failed = error.problems
                counts, restarts = ranks.total(engine.counts - counts), ranks.total(grader.restarts)
                with interrupts_held():  # an update and its record belong together
                    here, at = at, None
                    learner.update(stats)
                    metrics = rollout_metrics(batch, counts) | learner_metrics(stats)
                    metrics |= {"skipped_problems": failed, "problems/epoch": next_draw / len(problems.train)}
                    record.traces(here.step + 1, batch.drawn())
                    metrics |= speed_metrics(stats, watch.seconds.get("learn"), peak_flops(config, learner.device))
                    metrics |= watch.metrics() | memory_metrics() | {"time/save": saving.seconds.pop("save", 0.0)}
                    metrics |= {"time/grader_restarts": restarts}
                    record.metrics(here.step + 1, metrics)
                    at = Position(here.step + 1, next_draw, here.failed_in_a_row + 1 if failed else 0)
                if at.step % config.record.save_every == 0:
                    save()
                stop_when_numbers_fail(at, stats, failed, config)
        finally:
            save()
    ranks.from_first(write_report, run)
    return run
