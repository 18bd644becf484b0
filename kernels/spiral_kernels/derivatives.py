"""Operations whose gradient has no gradient of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def first_only(operation: str, gradient: Tensor | None) -> Tensor | None:
    """The gradient; under create_graph one that raises RuntimeError where it is differentiated.

    Left alone, autograd would differentiate what is written in a backward and take what a forward stored for constant.
    """
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    return _FirstOnly.apply(gradient if gradient.requires_grad else gradient.detach().requires_grad_(), operation)


class _FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, operation):
        ctx.operation = operation
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.operation}: its gradient has no gradient of its own; the backend `reference` has one")
