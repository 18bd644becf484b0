"""Tiles of logits, rows x vocabulary, and what a row backend does with one.

A *row backend* (torch_rows.py, native.py, triton_rows.py) does the softmax arithmetic on a tile that a GEMM wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spiral_kernels.linear_logprob.head import Head

TILE_ROWS = {"cpu": 1024, "cuda": 2048}
TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # CPU: a 4 MB float32 tile stays in the L2/L3 cache
CHUNK_BYTES = {"cpu": 40 << 20, "cuda": 1 << 30}  # all logits of some rows


class Tile(NamedTuple):
    """The products h.w of C rows and of the vocabulary entries first .. first + B - 1, and what makes them l."""

    logits: Tensor  # (C, B), contiguous
    first: int
    targets: Tensor  # (C,)
    scale: Tensor  # (C,) 1 / temperature
    bias: Tensor | None  # (B,)
    soft_cap: float | None


class RowSums(NamedTuple):
    """Per row (C,), over all classes but the true one."""

    origin: Tensor  # near max l, never far below it; -inf at first
    sum: Tensor  # sum exp(l - origin)
    weighted: Tensor | None  # sum exp(l - origin) (l - origin), for the entropy

    @classmethod
    def none_yet(cls, scale: Tensor, with_entropy: bool) -> RowSums:
        zeros = torch.zeros_like(scale)
        return cls(torch.full_like(scale, -torch.inf), zeros, torch.zeros_like(scale) if with_entropy else None)


class RowGradient(NamedTuple):
    """Per row (C,): the loss's derivatives, and p_v = exp((l_v - origin) - log_norm)."""

    origin: Tensor
    log_norm: Tensor
    grad: Tensor  # of the loss by the row's log-prob
    of_true: Tensor  # the true class's entry of the result
    of_entropy: Tensor | None  # of the loss by minus the row's entropy
    entropy: Tensor | None


class RowBackend(Protocol):
    WHOLE_ROWS: bool  # its tiles hold all logits of a row

    def accumulate(self, tile: Tile, sums: RowSums) -> None:
        """Add the tile to `sums`, in place; the tile stays."""

    def exponentials(self, tile: Tile, sums: RowSums) -> Tensor:
        """Likewise, and put exp(l - origin), times the soft cap's derivative, in the place of each logit, 0 in the true
        class's. Returns, (C,), what the rows' earlier exponentials must be multiplied by to have the same origin."""

    def gradient(self, tile: Tile, of: RowGradient, dtype: torch.dtype) -> Tensor:
        """(C, B) of `dtype`, by the products h.w: cap's derivative * scale * (grad (1[v = target] - p_v) +
        of_entropy p_v (log p_v + entropy)). May reuse the storage of the tile."""


def row_gradient(
    tile_scale: Tensor,
    true_slope: Tensor | None,
    logp: Tensor,
    origin: Tensor,
    log_norm: Tensor,
    grad: Tensor,
    of_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> RowGradient:
    """The true class's entry is formed here, once: 1 - p = -expm1(log p) keeps its digits as p -> 1."""
    of_true = -grad * torch.expm1(logp)
    if of_entropy is not None:  # 0 * -1e30, not 0 * -inf
        of_true = of_true + of_entropy * logp.exp() * (logp.clamp(min=-1e30) + entropy)
    of_true = of_true * tile_scale
    if true_slope is not None:
        of_true = of_true * true_slope
    return RowGradient(origin, log_norm, grad, of_true, of_entropy, entropy)


class Tiles:
    """How R rows x V logits are cut, and the buffer they are written to: one tile, or (`keep`) whole rows of tiles."""

    def __init__(self, hidden: Tensor, head: Head, n_rows: int, *, keep: bool = False, whole_rows: bool = False):
        kind = hidden.device.type if hidden.device.type in TILE_ROWS else "cpu"
        wide = hidden.is_cuda and hidden.dtype == torch.bfloat16  # cuBLAS gives float32 products of bfloat16
        dtype = torch.float32 if wide else hidden.dtype
        self.out_dtype = {"out_dtype": torch.float32} if wide else {}
        self.head, self.n_rows, self.keep = head, n_rows, keep or whole_rows
        vocabulary = head.weight.shape[0]
        most = max(1, CHUNK_BYTES[kind] // (vocabulary * dtype.itemsize)) if self.keep else TILE_ROWS[kind]
        self.height = max(1, -(-n_rows // max(1, -(-n_rows // most))))  # of nearly equal height
        self.width = vocabulary if whole_rows else max(1, min(TILE_ELEMENTS[kind] // self.height, vocabulary))
        elements = self.height * (vocabulary if self.keep else self.width)
        self.buffer = torch.empty(elements, dtype=dtype, device=hidden.device)

    def row_parts(self) -> Iterator[slice]:
        return (slice(r, min(r + self.height, self.n_rows)) for r in range(0, self.n_rows, self.height))

    def of_rows(self, targets: Tensor, scale: Tensor) -> Iterator[tuple[Tile, Tensor]]:
        """The tiles of these rows and the weight rows (B, H) of each; unless kept, valid until the next."""
        bias, rows = self.head.bias, len(targets)
        for first in range(0, self.head.weight.shape[0], self.width):
            block = self.head.weight[first : first + self.width]
            start = first * rows if self.keep else 0
            logits = self.buffer[start : start + rows * len(block)].view(rows, len(block))
            of_block = None if bias is None else bias[first : first + len(block)]
            yield Tile(logits, first, targets, scale, of_block, self.head.soft_cap), block

    def multiply(self, h: Tensor, block: Tensor, tile: Tile) -> None:
        torch.mm(h, block.t(), **self.out_dtype, out=tile.logits)


def rows_of(hidden: Tensor, row_index: Tensor | None, part: slice) -> Tensor:
    return hidden[part] if row_index is None else hidden.index_select(0, row_index[part])


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, from the GEMM in `dtype` where it can."""
    if a.dtype != dtype and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed over tiles in total's dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += product(a, b, total.dtype)


def check_values(
    operation: str, hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, scale: Tensor
) -> None:
    """On CUDA this would wait for the device; an index out of range stops the kernel that uses it there."""
    if hidden.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for name, values, limit in (("targets", targets, weight.shape[0]), ("row_index", row_index, hidden.shape[0])):
        if values is not None and values.numel():
            low, high = (int(v) for v in values.aminmax())
            if low < 0 or high >= limit:
                found = low if low < 0 else high
                raise IndexError(f"{operation}: {name} must lie in 0 .. {limit - 1}, found {found}")
    if not ((scale > 0) & (scale < torch.inf)).all():
        found = (1 / scale)[~((scale > 0) & (scale < torch.inf))][0]
        raise ValueError(f"{operation}: temperature must be > 0 and finite, found {found}")
