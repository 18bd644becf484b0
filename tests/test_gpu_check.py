"""`make gpu-check` without a GPU: what it says, what it records of tests, what it leaves out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bench.gpu import __main__ as gpu_check

TESTS = """
import time
import pytest

pytestmark = pytest.mark.gpu

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="no such device")
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError("no room")
def test_broken(broken): pass
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_line_and_an_error_code(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path / "out.json")]
    run = subprocess.run(command, cwd=gpu_check.ROOT, capture_output=True, text=True, env=gpu_check.environment())
    assert run.returncode == 1 and not (tmp_path / "out.json").exists()
    (line,) = run.stdout.splitlines()
    assert line.startswith("gpu-check: nothing was run: torch") and line.endswith("finds no CUDA device")


def test_every_outcome_is_recorded_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(gpu_check, "TESTS", (str(tmp_path / "test_some.py"),))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # this process may be one, the pytest within is none
    found = gpu_check.run_tests(tmp_path, 60)
    outcomes = {line["test"].split("::")[1]: line for line in found["outcomes"]}
    assert {name: line["outcome"] for name, line in outcomes.items()} == {
        **{"test_good": "passed", "test_bad": "failed", "test_left_out": "skipped", "test_broken": "failed"}
    }
    assert "assert 1 == 2" in outcomes["test_bad"]["why"] and "no room" in outcomes["test_broken"]["why"]
    assert found["counts"] == {"passed": 1, "failed": 2, "skipped": 1} and found["ended"] != "well"


def test_what_takes_too_long_is_stopped():
    assert gpu_check.run_for([sys.executable, "-c", "import time; time.sleep(60)"], 1, {}) == "stopped after 1 s"


def test_a_machine_without_pytest(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert gpu_check.run_tests(tmp_path, 1) == {"left_out": "not installed: pytest, hypothesis"}


def test_versions_name_what_is_missing():
    assert gpu_check.versions()["torch"] == torch.__version__
    assert {"triton", "transformers", "flash-attn"} <= set(gpu_check.versions())


def test_the_learners_steps_on_a_tiny_shape(tmp_path):
    """What runs at Qwen3-4B's shape on a GPU, on the CPU; both contenders have the same gradient up to bfloat16."""
    from transformers import Qwen3Config

    from bench.gpu.learner import Setting, figures

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    Qwen3Config(vocab_size=300, num_key_value_heads=2, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    lines: list[dict] = []
    figures(Setting(tmp_path, "cpu", (200, 400), prompt=16, rank=4), 60, lines.append)
    assert [line["name"] for line in lines] == [
        *("ours, 200 tokens", "ours, 400 tokens"),
        *("peer: transformers and peft, 200 tokens", "peer: transformers and peft, 400 tokens"),
    ]
    for line, size in zip(lines, (200, 400) * 2, strict=True):
        assert line["seconds"] > 0 and line["peak_gib"] is None and "mfu" not in line
        if line["name"].startswith("ours"):
            assert size - 8 <= line["tokens"] <= size and line["planned"]["peak_gib"] > 0
            assert line["tokens_per_s_logical"] > 2 * line["tokens_per_s_computed"]  # 4 traces share their prompt
        else:
            assert line["gradients_differ_by"] < 0.1
    lines.clear()
    figures(Setting(tmp_path, "cpu", (400,), prompt=16, rank=4), -1, lines.append)
    assert "left_out" in lines[0] and len(lines) == 1
