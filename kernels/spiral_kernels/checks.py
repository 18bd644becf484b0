"""What a public function says of an argument that does not fit: one line that names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor


class Checks:
    """The checks of one operation, whose name begins every message."""

    def __init__(self, operation: str):
        self.operation = operation

    def need(self, good: bool, message: str) -> None:
        if not good:
            raise ValueError(f"{self.operation}: {message}")

    def tensors(self, **values: object) -> None:
        for name, value in values.items():
            dense = isinstance(value, Tensor) and value.layout == torch.strided
            self.need(dense, f"{name} must be a dense tensor, got {type(value).__name__}")

    def beside(
        self, name: str, value: object, shape: Sequence[int], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """A tensor without gradient, of this shape and dtype (None: any real one) and on the others' device."""
        self.tensors(**{name: value})
        fits = tuple(value.shape) == tuple(shape) and (
            not value.is_complex() if dtype is None else value.dtype == dtype
        )
        kind = "real numbers" if dtype is None else str(dtype).removeprefix("torch.")
        self.need(fits, f"{name} must be {tuple(shape)} {kind}, got {described(value)}")
        self.need(value.device == device, f"{name} is on {value.device}, the other tensors on {device}")
        self.need(not value.requires_grad, f"{name} carries no gradient; detach it")

    def number(self, name: str, value: object, *, above: float = -math.inf, finite: bool = True) -> float:
        """A real number, not NaN and not a bool."""
        good = isinstance(value, Real) and not isinstance(value, bool) and value == value
        good = good and value > above and not (finite and abs(value) == math.inf)
        if not good:  # a compiled function, where a number may be symbolic, forms no message
            kind = f"a {'finite ' if finite else ''}number{'' if above == -math.inf else f' > {above}'}"
            self.need(False, f"{name} must be {kind}, got {value!r}")
        return float(value)

    def whole(self, name: str, value: object, least: int) -> int:
        good = isinstance(value, Integral) and not isinstance(value, bool) and value >= least
        if not good:
            self.need(False, f"{name} must be a whole number >= {least}, got {value!r}")
        return value

    def pair(self, name: str, value: object) -> tuple:
        good = isinstance(value, (tuple, list)) and len(value) == 2
        if not good:
            self.need(False, f"{name} must be (low, high), got {value!r}")
        return tuple(value)

    def bounds(self, name: str, value: object) -> tuple[float, float]:
        """(low, high) of a ratio, in this order; high may be infinite."""
        low, high = (self.number(name, bound, finite=False) for bound in self.pair(name, value))
        if not 0 <= low <= high:
            self.need(False, f"{name} must be (low, high) with 0 <= low <= high, got {value!r}")
        return low, high


def described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
