"""The loss and its gradient over chunks of rows x V logits, each formed once and turned into its gradient in place.

A chunk holds all logits of some rows, cut into tiles (C, B) that stay in cache while a row backend of linear_logprob
works on them. First pass: a tile's GEMM, then its row sums. Then each row's log-prob is known, so is the derivative of
the loss by it, and the second pass turns every tile into its gradient and multiplies it with its rows of the weight.
Arithmetic and precision are linear_logprob's (tiled.py): softmax in float32 (float64 for float64 inputs), the true
class apart, so that 1 - p keeps its digits; bfloat16 logits on CPU, float32 ones on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.linear_logprob import torch_rows
from spiral_kernels.linear_logprob.tiled import (
    TILE_ELEMENTS,
    RowBackend,
    RowSums,
    add_product,
    check_range,
    softmax,
)
from spiral_kernels.linear_logprob.torch_rows import put, true_column
from spiral_kernels.policy_loss.losses import Settings, kl_terms, surrogate

CHUNK_BYTES = {"cpu": 40 << 20, "cuda": 1 << 30}  # of logits


class Rows(NamedTuple):
    """What the loss of a row needs beside its log-prob, each (R,)."""

    advantages: Tensor
    rollout_logp: Tensor
    token_weight: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None

    def at(self, index: Tensor | slice, dtype: torch.dtype) -> Rows:
        return Rows(*(None if x is None else x[index].to(dtype) for x in self))


class Terms(NamedTuple):
    """Each (R,): what a row adds to the loss and its derivative by the row's log-prob, entropy apart."""

    value: Tensor
    slope: Tensor
    live: Tensor
    ratio: Tensor
    below: Tensor
    above: Tensor
    kl: Tensor


def linear_policy_loss(
    rows: RowBackend,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    row_index: Tensor | None,
    scale: Tensor,
    of_rows: Rows,
    settings: Settings,
    entropy_coef: float,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss (), d_hidden (N, H), d_weight (V, H), logp (R,), entropy (R,), statistics (5,) in the order of the result.

    scale (R,) = 1 / temperature. A gradient that is not needed is (0,).
    """
    check_range("linear_policy_loss", "targets", targets, weight.shape[0])
    if row_index is not None:
        check_range("linear_policy_loss", "row_index", row_index, hidden.shape[0])
    dtype, device, n_rows = scale.dtype, hidden.device, targets.shape[0]
    kept = of_rows.token_weight.nonzero()[:, 0]
    source = kept if row_index is None else row_index[kept]  # hidden row of each row that counts
    targets, scale, of_rows = targets[kept], scale[kept], of_rows.at(kept, dtype)
    logp, entropy = (torch.empty(len(kept), dtype=dtype, device=device) for _ in range(2))
    # repeated rows are summed, so they need the accumulation dtype
    d_hidden = torch.zeros(
        hidden.shape if need_hidden else 0, dtype=hidden.dtype if row_index is None else dtype, device=device
    )
    d_weight = torch.zeros(weight.shape if need_weight else 0, dtype=dtype, device=device)
    chunk = Chunk(weight, len(kept), device)
    for part in chunk.row_parts():
        h = hidden.index_select(0, source[part])
        sums = RowSums(scale.new_full((len(h),), -torch.inf), scale.new_zeros(len(h)), scale.new_zeros(len(h)))
        for first, block, tile in chunk.tiles(len(h)):
            torch.mm(h, block.t(), **chunk.out_dtype, out=tile)
            # native and triton leave the tile but for the true class, which `gradient` does not read; torch does not
            rows.accumulate(tile.clone() if rows is torch_rows else tile, first, targets[part], scale[part], sums)
        true = torch.linalg.vecdot(h.to(dtype), weight[targets[part]].to(dtype)) * scale[part]
        logp[part], origin, log_norm, entropy[part] = softmax(sums, true)
        if not (need_hidden or need_weight):
            continue
        slope = row_terms(settings, logp[part], of_rows.at(part, dtype)).slope
        of_entropy = entropy_coef * of_rows.token_weight[part] * scale[part]
        d_h = torch.zeros(h.shape, dtype=dtype, device=device)
        for first, block, tile in chunk.tiles(len(h)):
            of_tile = tile, first, targets[part], scale[part], origin, log_norm, logp[part]
            if entropy_coef != 0:  # before `gradient`, which may overwrite the tile
                extra = _entropy_gradient(*of_tile, entropy[part], of_entropy)
            d_logits = rows.gradient(*of_tile, slope, h.dtype)
            if entropy_coef != 0:
                d_logits = extra.add_(d_logits).to(h.dtype)
            if need_hidden:
                add_product(d_h, d_logits, block)
            if need_weight:
                add_product(d_weight[first : first + len(block)], d_logits.t(), h)
        if need_hidden and row_index is None:
            d_hidden[source[part]] = d_h.to(d_hidden.dtype)
        elif need_hidden:
            d_hidden.index_add_(0, source[part], d_h)

    terms = row_terms(settings, logp, of_rows)
    total = terms.value.sum(dtype=torch.float64)
    if entropy_coef != 0:
        total = total - entropy_coef * (of_rows.token_weight.double() * entropy).sum()
    return (
        total.to(dtype),
        d_hidden.to(hidden.dtype),
        d_weight.to(weight.dtype),
        *(x.new_zeros(n_rows).index_copy(0, kept, x) for x in (logp, entropy)),
        _statistics(terms).to(dtype),
    )


def row_terms(settings: Settings, logp: Tensor, of_rows: Rows) -> Terms:
    """Of rows whose weight is not 0."""
    credit, rollout, weight, old, ref = of_rows
    live = credit != 0
    factor = torch.where(live, weight, 0)
    if old is not None:
        factor = factor * torch.where(live, old - rollout, 0).exp().clamp(max=settings.tis_cap)
    log_ratio = torch.where(live, logp - (rollout if old is None else old), 0)
    each = surrogate(settings, log_ratio, torch.where(live, logp, 0), credit)
    value, slope, kl = factor * each.value, factor * each.derivative, torch.zeros_like(logp)
    if ref is not None:
        kl, kl_slope = kl_terms(settings.kl, logp - ref)
        if settings.kl_coef != 0:
            value = value + weight * settings.kl_coef * kl
            slope = slope + weight * settings.kl_coef * kl_slope
    return Terms(value, slope, live, log_ratio.exp(), each.below & live, each.above & live, kl)


def _statistics(terms: Terms) -> Tensor:
    """(5,) float64."""
    n_live = terms.live.sum()
    share = n_live.clamp(min=1).double()
    ratio = torch.where(terms.live, terms.ratio, 0).double()
    statistics = [
        torch.where(n_live == 0, 1, ratio.sum() / share),
        torch.where(n_live == 0, 1, torch.cat([ratio, ratio.new_zeros(1)]).amax()),
        terms.below.sum() / share,
        terms.above.sum() / share,
        terms.kl.sum(dtype=torch.float64) / max(len(terms.kl), 1),
    ]
    return torch.stack(statistics)


def _entropy_gradient(
    tile: Tensor,
    first: int,
    targets: Tensor,
    scale: Tensor,
    origin: Tensor,
    log_norm: Tensor,
    logp: Tensor,
    entropy: Tensor,
    factor: Tensor,
) -> Tensor:
    """(C, B), new: factor * p_v (log p_v + entropy), the derivative of -entropy by l_v. All else (C,)."""
    log_p = tile.to(scale.dtype, copy=True).mul_(scale[:, None]).sub_(origin[:, None]).sub_(log_norm[:, None])
    put(log_p, *true_column(targets, first, tile.shape[1]), logp)
    p = log_p.exp()
    return log_p.clamp_(min=-1e30).add_(entropy[:, None]).mul_(p).mul_(factor[:, None])  # 0 * -1e30, not 0 * -inf


class Chunk:
    """The buffer for a chunk's logits, and how R rows are cut into chunks of nearly equal height."""

    def __init__(self, weight: Tensor, n_rows: int, device: torch.device):
        kind = device.type if device.type in CHUNK_BYTES else "cpu"
        wide = device.type == "cuda" and weight.dtype == torch.bfloat16
        dtype = torch.float32 if wide else weight.dtype
        self.out_dtype = {"out_dtype": torch.float32} if wide else {}
        self.weight, self.n_rows = weight, n_rows
        most = max(1, CHUNK_BYTES[kind] // (weight.shape[0] * dtype.itemsize))
        n_chunks = -(-n_rows // most)
        self.height = -(-n_rows // max(n_chunks, 1))
        self.width = max(1, min(TILE_ELEMENTS[kind] // max(self.height, 1), weight.shape[0]))
        self.buffer = torch.empty(self.height * weight.shape[0], dtype=dtype, device=device)

    def row_parts(self) -> Iterator[slice]:
        return (slice(r, min(r + self.height, self.n_rows)) for r in range(0, self.n_rows, max(self.height, 1)))

    def tiles(self, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First vocabulary entry, weight rows (B, H) and contiguous logits (count, B) of each tile of a chunk."""
        for first in range(0, self.weight.shape[0], self.width):
            block = self.weight[first : first + self.width]
            start = first * count
            yield first, block, self.buffer[start : start + count * len(block)].view(count, len(block))
