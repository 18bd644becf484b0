"""The heads' Triton kernels without a GPU: every case of their tests that float32 can hold, in Triton's interpreter.

The interpreter is chosen when a process starts, so each file of cases has one of its own. Their machine code for Hopper
is test_hopper.py's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import needs_interpreter

pytestmark = [needs_interpreter, pytest.mark.timeout(600)]
# Large vocabularies: the interpreter's time goes by the number of tiles; interpreted_head.py has them in large ones.
LARGE = ("32000", "15193", "memory", "31_logits")
OF_NO_KERNEL = ("bfloat16", "on_cuda", "any_shape", "opcheck", "compiles", "equals_linear_logprob", "bad_input")


def interpret(file: str, cases: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", cases]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name(file))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout and "skipped" not in run.stdout, run.stdout


@pytest.mark.parametrize("file", ["test_linear_logprob.py", "test_linear_policy_loss.py"])
def test_cases_of_both_operations(file):
    interpret(file, " and ".join(["triton", *(f"not {name}" for name in (*LARGE, *OF_NO_KERNEL))]))


def test_parts_of_the_kernels():
    interpret("interpreted_head.py", "test")
