"""Compiles all launches of launches.py for sm_90 without a GPU and reads what the machine code uses.

`python -m bench.hopper.compiled [operation ...]` prints the rows as JSON, for the triton that this process imports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.hopper.launches import OPERATIONS

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Row(NamedTuple):
    """One compiled kernel."""

    operation: str  # of launches.py
    kernel: str
    pointers: str  # dtypes of its tensors, in order, each run of equal ones once
    constants: str  # tile sizes and switches; arguments that are None or 1, for which the kernel is specialised
    warps: int
    stages: int
    registers: int  # per thread
    stack: int  # bytes per thread: spilled registers
    shared: int  # bytes per program
    wgmma: int  # instructions in the machine code
    mma: int
    instructions: int
    bf16_dot: bool


class NoGPU:
    """A driver of a Hopper GPU that compiles and launches nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(operations: Iterable[Callable[[], None]] = OPERATIONS) -> list[Row]:
    """Calls the operations with compiling in the place of launching; one row per kernel as it would be specialised."""
    rows: dict[str, Row] = {}
    launch = JITFunction.run
    operation = None

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in rows:
            rows[kernel.hash] = _read(operation.__name__, self, kernel)
        return kernel

    driver.set_active(NoGPU())
    JITFunction.run = compile_only
    try:
        for operation in operations:
            before = len(rows)
            operation()
            if len(rows) == before:
                raise RuntimeError(f"bench/hopper/launches.py: {operation.__name__} launched no new kernel")
    finally:
        JITFunction.run = launch
    return sorted(rows.values())


def _read(operation: str, function: JITFunction, kernel) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
        code = _tool("nvdisasm", "-c", "-ndf", cubin)
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", code, re.MULTILINE)
    constants = {function.arg_names[path[0]]: value for path, value in kernel.src.constants.items()}
    pointers = [t for t in kernel.src.signature.values() if t.startswith("*")]
    return Row(
        operation=operation,
        kernel=function.__name__,
        pointers=" ".join(t for i, t in enumerate(pointers) if i == 0 or t != pointers[i - 1]),
        constants=" ".join(f"{name}={constants[name]}" for name in function.arg_names if name in constants),
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=used["REG"],
        stack=used["STACK"],
        shared=kernel.metadata.shared,
        wgmma=sum(m in ("HGMMA", "QGMMA", "IGMMA") for m in mnemonics),
        mma=mnemonics.count("HMMA"),
        instructions=len(mnemonics) - mnemonics.count("NOP"),
        bf16_dot=re.search(r"tt\.dot .*tensor<\d+x\d+xbf16> \* tensor<\d+x\d+xbf16>", kernel.asm["ttir"]) is not None,
    )


def _tool(name: str, *arguments) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    wanted = [operation for operation in OPERATIONS if operation.__name__ in sys.argv[1:] or not sys.argv[1:]]
    print(json.dumps({"triton": triton.__version__, "kernels": [row._asdict() for row in compile_all(wanted)]}))
