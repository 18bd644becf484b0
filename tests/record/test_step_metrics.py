"""The numbers of a step, counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spiral_fast.learner.step_stats import StepStats
from spiral_fast.record.step_metrics import memory_metrics, rollout_metrics, speed_metrics
from spiral_fast.rollout.engine import TokenCounts
from spiral_fast.rollout.live_batch import LiveBatch
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey


def trace(level: int, set: int, index: int, answer: str | None, credit: float, length: int = 2, **values) -> Trace:
    logp = np.full(length, -0.25 * (index + 1), np.float32)
    made = Trace(TraceKey("p", level, set, index), [1], [7] * length, logp, "stop", 0, answer=answer, credit=credit)
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def batch() -> LiveBatch:
    """One live problem with aggregations, one dead one without."""
    search = [
        trace(SEARCH, -1, i, answer, 0.5 - i, length=i + 1, reward=float(i == 0), verdict="wrong")
        for i, answer in enumerate(["4", "4", None, "5"])
    ]
    search[3].gated, search[3].credit, search[3].finish_reason = True, 0.0, "length"
    aggregation = [
        [trace(AGGREGATION, k, j, answer, 0.25, reward=1.0, verdict="could_not_grade") for j, answer in enumerate(pair)]
        for k, pair in enumerate([("4", "5"), ("6", None)])
    ]
    live = ProblemRollout(Problem("p", "q", "4"), 1, search, np.array([[0, 1], [0, 3]]), aggregation)
    same = [trace(SEARCH, -1, i, "8", 0.0, reward=0.0, verdict="wrong") for i in range(4)]
    dead = ProblemRollout(Problem("d", "q", "8"), 0, same, np.zeros((0, 0), np.int64), [])
    return LiveBatch(live=[live], dead=[dead], rounds=1)


def test_by_hand(batch):
    metrics = rollout_metrics(batch, TokenCounts(prompt=10, cached=6, computed=4, generated=26))
    expected = {
        "problems/drawn": 2,
        "problems/live": 1,
        "problems/dead": 1,
        "problems/discarded": 0,
        "answers/distinct_search": (2 + 1) / 2,  # {4, 5} and {8}
        "answers/distinct_aggregation": 3.0,  # {4, 5, 6}; the dead problem has none to count
        "sets/appearances_mean": 4 / 4,  # 2, 1, 0, 1
        "sets/appearances_min": 0,
        "sets/appearances_max": 2,
        "sets/unused_traces": 1 / 4,
        "length/search": (1 + 2 + 3 + 4 + 4 * 2) / 8,
        "length/max_search": 4,
        "length/aggregation": 2,
        "length/cut_share_search": 1 / 8,
        "credit/gated_share_search": 1 / 8,
        "credit/live_share_search": 3 / 8,
        "credit/live_share_aggregation": 1,
        "credit/abs_mean_search": (0.5 + 0.5 + 1.5) / 8,
        "reward/search": 1 / 8,
        "reward/could_not_grade": 4 / 12,
        "nll/aggregation": 0.375,
        "tokens/wasted": 8,
        "tokens/cached": 6,
        "tokens/generated": 26,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_without_engine_and_without_sets(batch):
    metrics = rollout_metrics(LiveBatch(dead=batch.dead, rounds=1), None)
    assert [key for key in metrics if key.startswith("tokens/")] == ["tokens/wasted"]
    assert not any(key.startswith("sets/") or key.endswith("_aggregation") for key in metrics)
    assert metrics["answers/distinct_search"] == 1


def test_a_step_without_any_trace():
    metrics = rollout_metrics(LiveBatch(), TokenCounts())
    assert metrics["problems/drawn"] == 0 and all(math.isfinite(value) for value in metrics.values())


def test_memory_stands_under_time(monkeypatch):
    assert memory_metrics()["time/peak_rss_mb"] > 50
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3_000_000)
    metrics = memory_metrics()
    assert metrics["time/peak_cuda_mb"] == 3.0 and all(key.startswith("time/") for key in metrics)


def test_speed_of_the_learner():
    stats = StepStats(policy_version=1, tokens_logical=900, tokens_computed=300, flops_computed=6e12)
    assert speed_metrics(stats, 2.0, peak=1e13) == {
        "time/learner_tokens_per_s_logical": 450,
        "time/learner_tokens_per_s_computed": 150,
        "time/learner_tflops_per_s": 3,
        "time/learner_mfu": pytest.approx(0.3),
    }
    assert "time/learner_mfu" not in speed_metrics(stats, 2.0, peak=None)
    assert speed_metrics(stats, None, 1e13) == {} == speed_metrics(StepStats(policy_version=1), 2.0, 1e13)
