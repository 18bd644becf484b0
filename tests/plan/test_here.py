"""MFU of a running training, and what it is told to expect, are the plan's own figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from spiral_fast.config import ModelConfig
from spiral_fast.learner.empty_model import empty_model
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.step_stats import StepStats
from spiral_fast.plan.gpus import GPUS, gpu_of
from spiral_fast.plan.here import expectation, peak_flops, plan_line
from spiral_fast.record.step_metrics import speed_metrics
from tests.plan.test_plan import plan_of
from tests.plan.test_simulated import NO_TARGETS, config_of

CUDA = torch.device("cuda", 0)


@pytest.fixture
def on_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_gpus_by_the_name_of_the_device():
    assert gpu_of("NVIDIA H100 80GB HBM3") == "h100-80gb" and gpu_of("NVIDIA H200") == "h200-141gb"
    assert gpu_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None and gpu_of("Tesla T4") is None
    names = [name for gpu in GPUS.values() for name in gpu.devices]
    assert len(names) == len(set(names)) and all(gpu.devices for gpu in GPUS.values())


def test_mfu_at_the_planned_speed_is_the_plans(on_an_h200):
    """Seconds, FLOPs and peak of the plan give back its --mfu; what checkpointing computes again does not count."""
    peak = peak_flops(config_of(), CUDA)
    for checkpointing in (False, True):
        plan = plan_of(f"learner.checkpointing={checkpointing}", gpu="h200-141gb")
        run = plan.work["pruned"]
        found = speed_metrics(StepStats(1, flops_computed=run.flops), plan.learn_seconds, peak)["time/learner_mfu"]
        share = run.flops / (run.flops + checkpointing * run.recomputed)
        assert found == pytest.approx(0.4 * share, rel=1e-12) and (share < 0.8) == checkpointing


def test_no_peak_where_none_is_known(on_an_h200, monkeypatch):
    assert peak_flops(config_of(), CUDA) == 989e12
    assert peak_flops(config_of("model.dtype=float32"), CUDA) is None
    assert peak_flops(config_of(), torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert peak_flops(config_of(), CUDA) is None


def test_what_to_expect_is_one_line():
    model = empty_model(ModelConfig(path="-"), Path(__file__).parent / "qwen3_4b")
    loaded = LoadedModel(model, None, frozenset(), 4096)
    assert expectation(config_of(), loaded) == []  # not on a GPU
    short = "rollout.search_max_new_tokens=64", "rollout.aggregation_max_new_tokens=64"
    config = config_of("rollout.engine=sglang", *short, *NO_TARGETS)
    line = plan_line(config, loaded, "h100-80gb", 1)
    found = re.fullmatch(
        r"  h100-80gb: expect ([\d.]+) of 76 GB .*; ([\d,]+) s a step, of them ([\d,]+) learning \(.*", line
    )
    assert found and 8 < float(found[1]) < 76, line
    one_learns = plan_line(config, loaded, "h100-80gb", 2)
    assert "no plan" not in one_learns and one_learns != line
    each_samples = plan_line(config_of("rollout.engine=radix", *short, *NO_TARGETS), loaded, "h100-80gb", 2)
    assert "may not fit: rollout needs 10.1 GB more than there is: rollout.cache_tokens=227736" in each_samples
    fp32 = config_of("rollout.engine=radix", "model.dtype=float32", *short, *NO_TARGETS)
    assert "no plan of this run (model.dtype: 'float32'" in plan_line(fp32, loaded, "h100-80gb", 2)
