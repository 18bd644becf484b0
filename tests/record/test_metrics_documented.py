"""docs/metrics.md lists exactly the metrics a step can write."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from spiral_fast.learner.learner import StepStats
from spiral_fast.record.charts import CHARTS
from spiral_fast.record.step_metrics import learner_metrics, memory_metrics, rollout_metrics, speed_metrics
from spiral_fast.record.stopwatch import Stopwatch
from spiral_fast.rollout.live_batch import LiveBatch
from spiral_fast.rollout.sglang.counts import SglangCounts
from tests.record.run_of_three_steps import rollout

ROOT = Path(__file__).resolve().parents[2]


def documented() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)


def written() -> set[str]:
    """Keys of a step in which everything exists; the phases, and a few more keys, are those of the training loop."""
    watch, loop = Stopwatch(), (ROOT / "spiral_fast" / "train.py").read_text()
    for phase in re.findall(r'\bwatch\("(\w+)"\)', loop):
        with watch(phase):
            pass
    stats = StepStats(policy_version=1, gradient_cosine=0.5, entropy={0: 0.1, 1: 0.2})
    batch = LiveBatch(live=[rollout()], rounds=1)
    metrics = rollout_metrics(batch, SglangCounts()) | learner_metrics(stats) | watch.metrics() | memory_metrics()
    metrics |= speed_metrics(StepStats(policy_version=1, flops_computed=1e12), 1.0, peak=1e15)
    return {"step", *metrics, *re.findall(r'"([\w/]+)":', loop)}


def test_every_metric_is_documented_and_every_documented_metric_is_written():
    keys = documented()
    assert len(keys) == len(set(keys))
    without_gpu = set() if torch.cuda.is_available() else {"time/peak_cuda_mb"}
    assert set(keys) - without_gpu == written()


def test_charts_draw_documented_metrics():
    assert {key for chart in CHARTS for key in chart.series} <= set(documented())
