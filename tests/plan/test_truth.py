"""The formulas beside the learner's own code at full size on fake CUDA tensors (fake_cuda.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spiral_fast.config import ModelConfig
from spiral_fast.learner.empty_model import empty_model
from spiral_fast.plan.memory import Micro, moments
from spiral_fast.plan.shape import shape_of

pytest.importorskip("triton")
HERE = Path(__file__).parent
QWEN3_4B = HERE / "qwen3_4b" / "config.json"


def measured(what: str, model: Path, cases: list[dict]) -> list[dict]:
    command = [sys.executable, str(HERE / "fake_cuda.py"), what, str(model), json.dumps(cases)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, env=_environment())
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "HF_HUB_OFFLINE": "1"}


def predicted(model: Path, case: dict, found: dict) -> dict[str, float]:
    """Of the moments; the truth has neither optimiser nor gradients from before."""
    shape = shape_of(empty_model(ModelConfig(path="-", **case.get("model", {})), model))
    micro = Micro(found["tokens"], found["rows"], case["checkpointing"], both_levels=False)
    return {m.name: m.total - 3 * shape.adapter_bytes for m in moments(shape, micro)}


def test_peak_memory_of_qwen3_4b_is_that_of_the_learner_within_5_percent():
    cases = [
        {"tokens": 20_000, "checkpointing": True},
        {"tokens": 48_000, "checkpointing": True, "sampled": 0.25},
        {"tokens": 90_000, "checkpointing": True, "sampled": 0.6},
        {"tokens": 6_000, "checkpointing": False},
    ]
    found = measured("memory", QWEN3_4B, cases)
    assert len(found) == len(cases)
    for case, truth in zip(cases, found, strict=True):
        by_moment = predicted(QWEN3_4B, case, truth)
        assert max(by_moment.values()) == pytest.approx(truth["peak"], rel=0.05), (case, truth, by_moment)
        # nearer than that: what is left are temporaries of a few megabytes
        assert max(by_moment.values()) == pytest.approx(truth["peak"], rel=0.005), (case, truth, by_moment)
    head = predicted(QWEN3_4B, cases[0], found[0])["head"]  # the forward's peak, where the tree is small
    assert head == pytest.approx(found[0]["head"], rel=0.005)


def test_peak_memory_of_other_shapes(tmp_path):
    """Without norms of queries and keys, an untied head, another rank, some of the layers adapted; wide heads."""
    llama = json.loads(QWEN3_4B.read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    wide = json.loads(QWEN3_4B.read_text()) | {"num_hidden_layers": 4, "intermediate_size": 1024, "hidden_size": 1024}
    some = {"lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}}
    for name, config, case in (
        ("llama", llama, {"tokens": 24_000, "checkpointing": True, "model": some}),
        ("wide", wide, {"tokens": 30_000, "checkpointing": True, "sampled": 0.1}),
    ):
        file = tmp_path / name / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(config))
        (truth,) = measured("memory", file, [case])
        by_moment = predicted(file, case, truth)
        assert max(by_moment.values()) == pytest.approx(truth["peak"], rel=0.05), (name, truth, by_moment)


def test_flops_are_those_of_torchs_counter_within_1_percent():
    found = measured("flops", QWEN3_4B, [{"tokens": 8_000}, {"tokens": 30_000, "sampled": 0.3}])
    assert len(found) == 2
    for truth in found:
        assert truth["cost"] == pytest.approx(truth["torch"], rel=0.01)
        assert truth["cost"] != truth["torch"]  # the first layer's inputs need no gradient: cost.py counts it
