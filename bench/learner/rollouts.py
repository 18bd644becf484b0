"""Rows of real rollouts: the run's own warm start, engine, grader and credit."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit import credit_of
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.rows import Row
from spiral_fast.loss_rows import loss_rows
from spiral_fast.rewards import make_grader
from spiral_fast.rewards.grading import Grading
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import SetUp
from spiral_fast.warm_start.run import warm_start


class Rollouts(NamedTuple):
    rows: list[Row]  # with the credits of the problems' own rewards, many of them 0
    all_live: list[Row]  # the same with a credit where there is none

    @property
    def lengths(self) -> str:
        """The distributions that decide what sharing saves."""
        prompt, sampled = ([len(getattr(row, name)) for row in self.rows] for name in ("prompt", "tokens"))
        live = np.mean([row.credit != 0 for row in self.rows])
        quantiles = (
            f"{name} {', '.join(f'{q:.0f}' for q in np.quantile(n, (0, 0.25, 0.5, 0.75, 1)))}"
            for name, n in (("prompt", prompt), ("sampled", sampled))
        )
        return f"{len(self.rows)} rows, {live:.0%} live; tokens (min, quartiles, max): {'; '.join(quantiles)}"


def sample(config: Config, parts: SetUp, n_problems: int) -> Rollouts:
    """Of the first problems, after the config's warm start; rollout log-probs are the learner's own, so each ratio is 1
    as on policy."""
    learner = Learner(config, parts.loaded)
    warm_start(config, learner, parts.prompts, parts.problems)
    engine, credit = make_engine(config, parts.loaded), credit_of(config)
    drawn = [(i, parts.problems.train[i]) for i in range(n_problems)]
    with make_grader(config) as grader, Grading(grader) as grading:
        rollouts = roll_out(engine, parts.prompts, drawn, config, on_trace=grading.submit)
        grading.finish(rollouts)
    engine.close()
    for rollout in rollouts:
        credit(rollout)
    rows = loss_rows(rollouts, config)
    logp = learner.log_probs(rows)
    rows = [dataclasses.replace(row, rollout_logp=values) for row, values in zip(rows, logp, strict=True)]
    signs = np.random.default_rng(0).choice([-0.5, 0.5], len(rows))
    all_live = [dataclasses.replace(r, credit=r.credit or float(s)) for r, s in zip(rows, signs, strict=True)]
    return Rollouts(rows, all_live)
