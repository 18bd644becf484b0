"""Log-probs of an LM head, and their gradient, over tiles of rows x vocabulary: the full logits never exist.

A tile of logits comes from a GEMM into one buffer that every tile reuses; a *row backend* (torch_rows.py, native.py,
triton_rows.py) does the softmax arithmetic on it. Of each row a forward keeps three numbers over all classes but the
true one (RowSums); the true class's logit is formed apart, in the accumulation dtype. So log p = -log(1 + exp(others -
true)) keeps its relative precision as p -> 1, and so does the true class's gradient 1 - p.

Accumulation dtype: float64 for float64 inputs, else float32. GEMMs run in the input dtype. bfloat16: logits are rounded
to bfloat16 on CPU (its GEMM has no float32 output), float32 on CUDA; the tile's gradient is rounded to bfloat16 for the
two GEMMs that follow, whose results are summed in float32.

Memory beyond inputs and outputs, C rows and B vocabulary entries per tile (C * B <= TILE_ELEMENTS of the device):
a few tiles, 3 (C, H) buffers; for bfloat16 also d_weight, and with row_index d_hidden, once in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

TILE_ROWS = {"cpu": 1024, "cuda": 2048}
TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # CPU: a 4 MB float32 tile stays in the L2/L3 cache


class RowSums(NamedTuple):
    """Per row (C,), over all classes but the true one, l = logit / temperature."""

    maximum: torch.Tensor  # max l
    sum: torch.Tensor  # sum exp(l - maximum)
    weighted: torch.Tensor | None  # sum exp(l - maximum) (l - maximum), for the entropy


class RowBackend(Protocol):
    """logits (C, B) of the vocabulary entries first .. first + B - 1, scratch. targets, scale = 1 / T: (C,)."""

    def accumulate(
        self, logits: torch.Tensor, first: int, targets: torch.Tensor, scale: torch.Tensor, sums: RowSums
    ) -> None:
        """Add the tile to `sums`, in place."""

    def gradient(
        self,
        logits: torch.Tensor,
        first: int,
        targets: torch.Tensor,
        scale: torch.Tensor,
        origin: torch.Tensor,
        log_norm: torch.Tensor,
        logp: torch.Tensor,
        grad: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """(C, B) of `dtype`: grad * scale * (1[v = target] - p_v); may reuse the storage of `logits`.

        p_v = exp((l_v - origin) - log_norm); logp is the true class's, grad the gradient by it, each (C,).
        """


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    rows: RowBackend,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_index: torch.Tensor | None,
    scale: torch.Tensor,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, origin, log_norm, entropy, each (R,); entropy is (0,) without `with_entropy`. scale (R,) = 1 / temperature.

    The log-sum-exp is origin + log_norm: in two parts, a large common offset of the logits costs no digits.
    """
    check_range("linear_logprob", "targets", targets, weight.shape[0])
    if row_index is not None:
        check_range("linear_logprob", "row_index", row_index, hidden.shape[0])
    n_rows = targets.shape[0]
    targets, scale = targets.contiguous(), scale.contiguous()
    logp = scale.new_empty(n_rows)
    origin = scale.new_empty(n_rows)
    log_norm = scale.new_empty(n_rows)
    entropy = scale.new_empty(n_rows if with_entropy else 0)
    tiles = Tiles(hidden, weight, n_rows)
    for part in tiles.row_parts():
        h = _rows_of(hidden, row_index, part)
        count = h.shape[0]
        sums = RowSums(
            scale.new_full((count,), -torch.inf),
            scale.new_zeros(count),
            scale.new_zeros(count) if with_entropy else None,
        )
        for first, block in tiles.blocks():
            rows.accumulate(tiles.logits(h, block), first, targets[part], scale[part], sums)
        true = torch.linalg.vecdot(h.to(scale.dtype), weight[targets[part]].to(scale.dtype)) * scale[part]
        logp[part], origin[part], log_norm[part], spread = softmax(sums, true)
        if with_entropy:
            entropy[part] = spread
    return logp, origin, log_norm, entropy


def softmax(sums: RowSums, true: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """logp, origin, log_norm, entropy (None without sums.weighted) of rows, each (C,): from the sums over the other
    classes and the true class's l. The log-sum-exp is origin + log_norm."""
    log_sum = sums.sum.log()
    logp = -torch.logaddexp(sums.maximum - true + log_sum, torch.zeros_like(true))
    origin = torch.maximum(sums.maximum, true)
    log_norm = torch.logaddexp(sums.maximum - origin + log_sum, true - origin)
    if sums.weighted is None:
        return logp, origin, log_norm, None
    # the entropy is the sum over classes of p (lse - l): no term is negative, so nothing cancels as p -> 1
    lse_minus_others = origin - sums.maximum + log_norm - sums.weighted / sums.sum
    spread = torch.where(sums.sum > 0, -torch.expm1(logp) * lse_minus_others, 0)
    return logp, origin, log_norm, spread - torch.where(logp > -torch.inf, logp.exp() * logp, 0)


def backward(
    rows: RowBackend,
    grad_logp: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_index: torch.Tensor | None,
    scale: torch.Tensor,
    origin: torch.Tensor,
    log_norm: torch.Tensor,
    logp: torch.Tensor,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """d_hidden (N, H) and d_weight (V, H) in the inputs' dtype; (0,) for one that is not needed."""
    targets, scale = targets.contiguous(), scale.contiguous()
    grad_logp = grad_logp.to(scale.dtype).contiguous()
    d_hidden = d_weight = None
    if need_hidden:  # rows that repeat are summed, so they need the accumulation dtype
        dtype = hidden.dtype if row_index is None else scale.dtype
        d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    if need_weight:
        d_weight = torch.zeros(weight.shape, dtype=scale.dtype, device=weight.device)
    tiles = Tiles(hidden, weight, targets.shape[0])
    for part in tiles.row_parts():
        h = _rows_of(hidden, row_index, part)
        d_h = torch.zeros(h.shape, dtype=scale.dtype, device=h.device) if need_hidden else None
        for first, block in tiles.blocks():
            d_logits = rows.gradient(
                tiles.logits(h, block),
                first,
                targets[part],
                scale[part],
                origin[part],
                log_norm[part],
                logp[part],
                grad_logp[part],
                h.dtype,
            )
            if need_hidden:
                add_product(d_h, d_logits, block)
            if need_weight:
                add_product(d_weight[first : first + block.shape[0]], d_logits.t(), h)
        if need_hidden and row_index is None:
            d_hidden[part] = d_h
        elif need_hidden:
            d_hidden.index_add_(0, row_index[part], d_h)
    empty = hidden.new_empty(0)
    return (
        d_hidden.to(hidden.dtype) if need_hidden else empty,
        d_weight.to(weight.dtype) if need_weight else empty.clone(),
    )


class Tiles:
    """The tiling of R rows x V vocabulary entries, and the buffer the logits of each tile are written to."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, n_rows: int):
        kind = hidden.device.type if hidden.device.type in TILE_ROWS else "cpu"
        self.weight, self.n_rows = weight, n_rows
        self.height = max(1, min(TILE_ROWS[kind], n_rows))
        self.width = min(TILE_ELEMENTS[kind] // self.height, weight.shape[0])
        wide = hidden.is_cuda and hidden.dtype == torch.bfloat16
        dtype = torch.float32 if wide else hidden.dtype
        self.buffer = torch.empty(self.height * self.width, dtype=dtype, device=hidden.device)
        self.out_dtype = {"out_dtype": torch.float32} if wide else {}

    def row_parts(self) -> Iterator[slice]:
        return (slice(r, min(r + self.height, self.n_rows)) for r in range(0, self.n_rows, self.height))

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """First vocabulary entry and weight rows (B, H) of each tile."""
        return ((v, self.weight[v : v + self.width]) for v in range(0, self.weight.shape[0], self.width))

    def logits(self, h: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """(C, B), contiguous, valid until the next call."""
        shape = h.shape[0], block.shape[0]
        tile = self.buffer[: shape[0] * shape[1]].view(shape)
        return torch.mm(h, block.t(), **self.out_dtype, out=tile)


def _rows_of(hidden: torch.Tensor, row_index: torch.Tensor | None, part: slice) -> torch.Tensor:
    return hidden[part] if row_index is None else hidden.index_select(0, row_index[part])


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, summed over tiles in total's dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += torch.mm(a, b)


def check_range(operation: str, name: str, values: torch.Tensor, limit: int) -> None:
    """On CUDA the check would wait for the device; an index out of range stops the kernel that uses it there."""
    if values.device.type == "cpu" and values.numel():
        low, high = (int(v) for v in values.aminmax())
        if low < 0 or high >= limit:
            found = low if low < 0 else high
            raise IndexError(f"{operation}: {name} must lie in 0 .. {limit - 1}, found {found}")
