"""Compiles what the launchers of triton_rows.py would launch for a tile of a large head, without a GPU.

Prints one line per kernel: name and what cuobjdump says of registers and stack (spills).
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spiral_kernels.linear_logprob import tiled, triton_rows

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HOPPER = GPUTarget("cuda", 90, 32)


class CompileOnly:
    """Stands in for a kernel: kernel[grid](...) compiles it for the arguments as a launch would specialise it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, num_warps: int, **constants):
        signature, constexprs, attributes = {}, {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            if name in constants:
                signature[name], constexprs[name] = "constexpr", constants[name]
                continue
            is_tensor = isinstance(args[i], torch.Tensor)
            signature[name] = TYPES[args[i].dtype] if is_tensor else "i32"
            if is_tensor or args[i] % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
        built = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(built.asm["cubin"])
            command = [str(CUOBJDUMP), "--dump-resource-usage", str(cubin)]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(self.kernel.__name__, usage.strip().splitlines()[-1].strip())


if __name__ == "__main__":
    triton_rows.accumulate_kernel = CompileOnly(triton_rows.accumulate_kernel)
    triton_rows.gradient_kernel = CompileOnly(triton_rows.gradient_kernel)
    columns = tiled.TILE_ELEMENTS["cuda"] // tiled.TILE_ROWS["cuda"]
    logits, vector, targets = torch.empty(16, columns), torch.zeros(16), torch.zeros(16, dtype=torch.int64)
    for weighted in (None, vector):
        triton_rows.accumulate(logits, columns, targets, vector, tiled.RowSums(vector, vector, weighted))
    for dtype in (torch.float32, torch.bfloat16):
        triton_rows.gradient(logits, columns, targets, *[vector] * 5, dtype)
