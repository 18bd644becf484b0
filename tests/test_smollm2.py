"""What the demo model promises, on SmolLM2-135M: exact counts, engine = learner, splits and FSDP change nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from spiral_fast.config import load_config
from spiral_fast.credit import credit_of
from spiral_fast.learner.learner import Learner
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from spiral_fast.train import loss_rows
from tests.learner.tiny import gradient_of_step, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OVERRIDES = [
    "run_dir=unused",
    "model.dtype=float32",
    "problems.train_size=4",
    "problems.eval_size=2",
    "rollout={n_search: 4, n_sets: 2, set_size: 2, n_aggregations: 2}",
    "rollout.search_max_new_tokens=8",
    "rollout.aggregation_max_new_tokens=8",
    "learner.micro_batch_tokens=100000",
    "learner.warmup_steps=0",
]


def test_rollout_and_step():
    config = load_config("configs/smollm2_cpu.yaml", OVERRIDES)
    parts = set_up(config)
    engine = make_engine(config, parts.loaded)
    (rollout,) = roll_out(engine, parts.prompts, [(0, parts.problems.train[0])], config)

    prompts = [trace.prompt for trace in rollout.traces()]
    assert engine.counts.computed == len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})
    assert engine.counts.cached == sum(map(len, prompts)) - engine.counts.computed

    for k, group in enumerate(rollout.aggregation):  # rewards that give every level credit
        for j, trace in enumerate(group):
            trace.reward = float(k == 0 or j == 0)
    credit_of(config)(rollout)
    rows = loss_rows([rollout], config)

    learner = Learner(config, parts.loaded)
    whole, stats = gradient_of_step(learner, rows)
    assert stats.logp_gap_max < 1e-4
    assert stats.search_gradient_norm > 0 < stats.aggregation_gradient_norm
    largest = max(g.abs().max().item() for g in whole.values())

    small = config.learner.model_copy(update={"micro_batch_tokens": stats.tokens_computed // 4})
    parts_of_it, split = gradient_of_step(Learner(config.model_copy(update={"learner": small}), parts.loaded), rows)
    assert split.micro_batches > stats.micro_batches
    assert largest_difference(parts_of_it, whole) <= 5e-6 * largest

    before = {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}
    learner.step(rows)
    plain = {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            parameter.copy_(before[name])
    fsdp = config.learner.model_copy(update={"fsdp": True})
    try:
        sharded = Learner(config.model_copy(update={"learner": fsdp}), parts.loaded)
        sharded.step(rows)
        moved = {name: parameter.detach() for name, parameter in sharded.parameters.items()}
    finally:
        dist.destroy_process_group()
    assert max((plain[name] - before[name]).abs().max().item() for name in plain) > 1e-5
    assert largest_difference(moved, plain) <= 1e-6
