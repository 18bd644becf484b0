"""The head of a language model: from a hidden state to the logits a softmax takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """l = soft_cap * tanh((h.w + bias) / soft_cap) / temperature; bias and soft_cap may be None."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,) of the accumulation dtype
    soft_cap: float | None

    def true_class(self, h: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """l of each row's target and the soft cap's derivative there (None without one), (C,), for h (C, H)."""
        logits = torch.linalg.vecdot(h.to(scale.dtype), self.weight[targets].to(scale.dtype))
        if self.bias is not None:
            logits = logits + self.bias[targets]
        if self.soft_cap is None:
            return logits * scale, None
        return cap(logits, self.soft_cap) * scale, cap_slope(logits, self.soft_cap)


def cap(logits: Tensor, soft_cap: float) -> Tensor:
    return soft_cap * torch.tanh(logits / soft_cap)


def cap_slope(logits: Tensor, soft_cap: float) -> Tensor:
    """1 - tanh^2, which keeps its digits where tanh is near 1."""
    return (logits / soft_cap).cosh().square().reciprocal()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def head_of(weight: Tensor, bias: Tensor | None, soft_cap: float | None) -> Head:
    dtype = accumulation_dtype(weight.dtype)
    return Head(weight, None if bias is None else bias.to(dtype).contiguous(), soft_cap)
