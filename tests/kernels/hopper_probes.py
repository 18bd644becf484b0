"""Kernels whose machine code is known, put through the checker: prints its rows as JSON.

As in the checker itself, a process of its own decides whether Triton interprets or compiles.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from bench.hopper.compiled import compile_all


@triton.jit
def product(a_ptr, b_ptr, c_ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row, column, k = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)
    a = tl.load(a_ptr + row * stride + k[None, :])
    b = tl.load(b_ptr + k[:, None] * stride + column)
    tl.store(c_ptr + row * stride + column, tl.dot(a, b).to(c_ptr.dtype.element_ty))


def launch(rows: int, stride: int, dtype: torch.dtype, warps: int = 4) -> None:
    a, b, c = (torch.empty(1024, dtype=dtype, device="meta") for _ in range(3))
    product[(1,)](a, b, c, stride, ROWS=rows, COLUMNS=64, DEPTH=64, num_warps=warps)


def wgmma():
    launch(64, 64, torch.bfloat16)
    launch(64, 64, torch.bfloat16)  # the same once more


def too_few_rows():
    launch(16, 64, torch.bfloat16)


def unaligned():
    launch(64, 65, torch.bfloat16)


def float32():
    launch(64, 64, torch.float32)


def spills():
    launch(256, 64, torch.bfloat16, warps=1)


if __name__ == "__main__":
    rows = compile_all([wgmma, too_few_rows, unaligned, float32, spills])
    print(json.dumps([row._asdict() for row in rows]))
