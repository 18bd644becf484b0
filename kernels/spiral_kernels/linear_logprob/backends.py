"""What a backend's name stands for."""

from __future__ import annotations

from torch import Tensor

from spiral_kernels.linear_logprob import tiled, torch_rows
from spiral_kernels.linear_logprob.tiles import RowBackend


def row_backend(name: str) -> RowBackend:
    if name == "native":
        from spiral_kernels.linear_logprob import native

        return native
    if name == "triton":
        from spiral_kernels.linear_logprob import triton_rows

        return triton_rows
    return torch_rows


def forward(backend: str, *arguments) -> tuple[Tensor, ...]:
    """tiled.forward with this backend, arguments and results the same."""
    if backend == "triton":
        from spiral_kernels.linear_logprob import triton_head

        return triton_head.forward(*arguments)
    return tiled.forward(row_backend(backend), *arguments)
