"""The Triton row backend without a GPU: its values in Triton's interpreter, its machine code for Hopper."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_values_in_the_interpreter():
    """test_linear_logprob.py's cases for the backend `triton`; the interpreter is chosen when a process starts."""
    cases = "triton and not bfloat16 and not 49152 and not memory and not 31_logits and not on_cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", cases]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name("test_linear_logprob.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout and "skipped" not in run.stdout, run.stdout


def test_compiles_for_hopper_without_spills(tmp_path):
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py"))],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    usage = run.stdout.splitlines()
    assert len(usage) == 4
    for line in usage:
        assert " STACK:0 " in line, line
