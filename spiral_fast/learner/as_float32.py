"""A 16-bit model computed in float32 for a while: rounding falls by 2^16, and with it what a check must tolerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def as_float32(model: nn.Module) -> Iterator[None]:
    """Within: 16-bit parameters hold the same numbers in float32. After: the old dtypes, without a rounding between.

    Not for sharded models. Buffers stay, they are float32 where a model needs them so.
    """
    before = {p: p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)}
    try:
        for parameter in before:
            parameter.data = parameter.data.float()
        yield
    finally:
        for parameter, dtype in before.items():
            parameter.data = parameter.data.to(dtype)


def extra_bytes(model: nn.Module) -> int:
    """What `as_float32` takes."""
    return sum(2 * p.numel() for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16))
