"""Compiles under every triton that is there; what the chip's limits say of a compiled kernel; the committed table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.hopper.launches import STACK

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/hopper.json"
SECOND = "3.6.0"  # the release that torch 2.11 brings, compiled under beside the installed one
SECOND_FOLDER = ROOT / f".venv/triton-{SECOND}"  # `make setup` puts it there
MAX_REGISTERS, MAX_SHARED, MAX_STACK = 255, 227 * 1024, 64


def compile_under_each(only: Sequence[str] = ()) -> dict[str, list[dict]]:
    """Rows of compiled.py by triton release; each release in a process of its own, with an empty cache."""
    folders = [None, *([SECOND_FOLDER] if SECOND_FOLDER.exists() else [])]
    with tempfile.TemporaryDirectory() as cache:
        started = []
        for i, folder in enumerate(folders):
            path = [str(folder)] if folder else []
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
                "TRITON_CACHE_DIR": f"{cache}/{i}",
                "TRITON_INTERPRET": "0",
                "TRITON_DEFAULT_FP_FUSION": "1",  # what 3.9 takes as unset, with a warning
            }
            command = [sys.executable, "-m", "bench.hopper.compiled", *only]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("compiling for Hopper failed, see above")
    found = [json.loads(output) for output in outputs]
    return {result["triton"]: result["kernels"] for result in found}


def faults(row: dict) -> list[str]:
    """What keeps a compiled kernel from being right for the chip."""
    found = []
    if row["registers"] > MAX_REGISTERS:
        found.append(f"{row['registers']} registers a thread, the chip has {MAX_REGISTERS}")
    if row["shared"] > MAX_SHARED:
        found.append(f"{row['shared']} bytes of shared memory, the chip has {MAX_SHARED}")
    if row["stack"] > (MAX_STACK if row["kernel"] in STACK else 0):
        found.append(f"{row['stack']} bytes of stack: registers spill")
    if row["bf16_dot"] and not row["wgmma"]:
        found.append("a bfloat16 product without wgmma")
    return found


def committed() -> dict[str, list[dict]]:
    return json.loads(TABLE.read_text())
