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
