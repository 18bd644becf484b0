"""policy_loss's Triton kernel without a GPU: all cases of test_policy_loss.py and its own in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import needs_interpreter

pytestmark = [needs_interpreter, pytest.mark.timeout(600)]


def test_values_in_the_interpreter():
    """The interpreter is chosen when a process starts."""
    files = [str(Path(__file__).with_name(name)) for name in ("test_policy_loss.py", "interpreted_policy_loss.py")]
    cases = "(triton or interpreted or (opcheck and gspo)) and not bad_input"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", cases, *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout and "skipped" not in run.stdout, run.stdout
