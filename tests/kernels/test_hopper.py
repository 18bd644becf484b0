"""Every Triton kernel compiled for Hopper without a GPU: within the chip's limits and as docs/hopper.json says."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.hopper.check import ROOT, SECOND, SECOND_FOLDER, committed, compile_under_each, faults

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(600),
]


def test_every_kernel_is_right_for_the_chip_and_as_committed():
    """One test: it compiles for a minute of CPU, and each worker of a parallel run would compile for its own tests.

    Where a release of triton is not in the table, only the limits are held.
    """
    compiled, table = compile_under_each(), committed()
    broken = [(release, row["kernel"], faults(row)) for release in compiled for row in compiled[release] if faults(row)]
    assert not broken
    assert all(rows for rows in compiled.values())
    for release in set(compiled) & set(table):
        assert compiled[release] == table[release], "run: python -m bench.hopper"
    assert SECOND in table
    if SECOND not in compiled:
        pytest.skip(f"triton {SECOND} is not in {SECOND_FOLDER}: run `make setup`")
    assert {SECOND} < set(compiled) or set(compiled) == {SECOND}


def test_every_launched_kernel_of_the_package_is_in_the_table():
    trees = [ast.parse(file.read_text()) for file in (ROOT / "kernels").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    kernels = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    launched = {
        ast.unparse(node.func.value).split(".")[-1]
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)  # kernel[grid](...)
    }
    assert kernels & launched
    for rows in committed().values():
        assert {row["kernel"] for row in rows} == kernels & launched


@pytest.fixture
def probes(tmp_path):
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(Path(__file__).with_name("hopper_probes.py"))]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return {row["operation"]: row for row in json.loads(run.stdout)}


def test_the_checker_sees_wgmma_spills_and_alignment(probes):
    assert len(probes) == 5
    good = probes["wgmma"]
    assert faults(good) == [] and good["wgmma"] > 0 and good["bf16_dot"] and good["stack"] == 0
    assert good["pointers"] == "*bf16" and good["constants"] == "ROWS=64 COLUMNS=64 DEPTH=64"
    assert faults(probes["too_few_rows"]) == ["a bfloat16 product without wgmma"] and probes["too_few_rows"]["mma"] > 0
    assert not probes["float32"]["bf16_dot"] and faults(probes["float32"]) == []
    assert probes["unaligned"]["instructions"] > 1.5 * good["instructions"]  # an element at a time
    assert "registers spill" in faults(probes["spills"])[0]


def test_limits():
    row = {"kernel": "k", "registers": 255, "shared": 232448, "stack": 0, "bf16_dot": False, "wgmma": 0}
    assert faults(row) == []
    assert "256 registers" in faults(row | {"registers": 256})[0]
    assert "232449 bytes of shared memory" in faults(row | {"shared": 232449})[0]
    assert "8 bytes of stack" in faults(row | {"stack": 8})[0]
