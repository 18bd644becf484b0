"""What a recorded step must be whatever happened while it was sampled: whole groups of one policy, and its credits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from spiral_fast.config import Config
from spiral_fast.credit import credit_of
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.record.trace_store import read_rollouts
from spiral_fast.set_up import SetUp, set_up
from spiral_fast.trace import ProblemRollout

LARGEST_GAP = 1e-4  # of a log-prob, float32


def assert_whole(run: Path, config: Config, step: int) -> None:
    """Every problem of the step has all its traces, each once, all sampled by the adapter that the step began with (its
    log-probs, computed anew from the checkpoint, are those recorded), each aggregation from the very search traces that
    stand beside it; and the credits are those of these rewards."""
    rollouts = read_rollouts(run / "traces" / f"step_{step:06d}.parquet")
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][step - 1]
    assert recorded["step"] == step and recorded["skipped"] is None
    assert len(rollouts) == recorded["problems/drawn"] == config.batch.live_problems
    begun_with = str(run / "checkpoints" / f"step_{step - 1:06d}")
    parts = set_up(config.model_copy(update={"model": config.model.model_copy(update={"adapter": begun_with})}))
    source = PolicySource(parts.loaded)
    versions = set()
    for rollout in rollouts:
        _assert_complete(rollout, config, parts)
        for trace in rollout.traces():
            versions.add(trace.policy_version)
            ours = source.log_probs(trace.prompt, trace.tokens, config.rollout.temperature)
            assert np.abs(ours - trace.logp).max() <= LARGEST_GAP, (step, trace.key)
    assert versions == {recorded["policy_version"] - 1}
    before = [[trace.credit for trace in rollout.traces()] for rollout in rollouts]
    for rollout in rollouts:
        credit_of(config)(rollout)
    assert before == [[trace.credit for trace in rollout.traces()] for rollout in rollouts]
    assert np.any(before)


def _assert_complete(rollout: ProblemRollout, config: Config, parts: SetUp) -> None:
    shape = config.rollout
    keys = [(trace.key.level, trace.key.set, trace.key.index) for trace in rollout.traces()]
    search = [(0, -1, i) for i in range(shape.n_search)]
    assert keys == search + [(1, k, j) for k in range(shape.n_sets) for j in range(shape.n_aggregations)]
    (problem,) = (problem for problem in parts.problems.train if problem.id == rollout.problem.id)
    assert all(trace.prompt == parts.prompts.search(problem) for trace in rollout.search)
    for members, traces in zip(rollout.sets, rollout.aggregation, strict=True):
        prompt = parts.prompts.aggregation(problem, [rollout.search[i].tokens for i in members])
        assert all(trace.prompt == prompt for trace in traces), (rollout.draw, traces[0].key)
