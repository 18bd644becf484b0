"""The loss and its gradient over tiles of rows x vocabulary logits, each formed once.

With a frozen weight and no entropy bonus the gradient of a row's loss is that of its log-prob times a number, so
linear_logprob's forward gives it (tiled.py). Else a chunk holds all logits of some rows, cut into tiles (C, B). First
pass: a tile's GEMM, then its row sums while it is in cache. Then each row's log-prob and entropy are known, so is the
derivative of the loss by them, and the second pass turns every tile into its gradient in place and multiplies it with
its rows of the weight, and for a trained weight with the hidden states. Arithmetic and precision are linear_logprob's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.linear_logprob.backends import forward, row_backend
from spiral_kernels.linear_logprob.head import Head
from spiral_kernels.linear_logprob.tiled import softmax, sum_by_hidden_row
from spiral_kernels.linear_logprob.tiles import RowSums, Tiles, add_product, check_values, row_gradient
from spiral_kernels.policy_loss.losses import Settings, kl_terms, surrogate


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
    backend: str,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    row_index: Tensor | None,
    scale: Tensor,
    of_rows: Rows,
    settings: Settings,
    token_mask: tuple[float, float],
    entropy_coef: float,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss (), d_hidden (N, H), d_weight (V, H), logp (R,), entropy (R,), statistics (5,) in the order of the result.

    scale (R,) = 1 / temperature. A gradient that is not needed is (0,).
    """
    check_values("linear_policy_loss", hidden, head.weight, targets, row_index, scale)
    dtype, n_rows = scale.dtype, len(targets)
    kept = of_rows.token_weight.nonzero()[:, 0]
    source = kept if row_index is None else row_index[kept]  # hidden row of each row that counts
    targets, scale, of_rows = targets[kept], scale[kept], of_rows.at(kept, dtype)
    d_weight = scale.new_zeros(head.weight.shape if need_weight else 0)
    if need_weight or (need_hidden and entropy_coef != 0):
        of_head = hidden, head, targets, source, scale
        logp, entropy, d_rows = _by_chunks(
            backend,
            *of_head,
            of_rows,
            settings,
            token_mask,
            entropy_coef,
            need_hidden,
            d_weight if need_weight else None,
        )
        terms = row_terms(settings, token_mask, logp, of_rows)
    else:
        logp, _, _, entropy, d_rows = forward(backend, hidden, head, targets, source, scale, True, need_hidden)
        terms = row_terms(settings, token_mask, logp, of_rows)
        if need_hidden:
            d_rows *= terms.slope[:, None]

    total = terms.value.sum(dtype=torch.float64)
    if entropy_coef != 0:
        total = total - entropy_coef * (of_rows.token_weight.double() * entropy).sum()
    return (
        total.to(dtype),
        sum_by_hidden_row(d_rows, hidden.shape, hidden.dtype, source) if need_hidden else hidden.new_empty(0),
        d_weight.to(head.weight.dtype),
        *(x.new_zeros(n_rows).index_copy(0, kept, x) for x in (logp, entropy)),
        _statistics(terms).to(dtype),
    )


def _by_chunks(
    backend: str,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    source: Tensor,
    scale: Tensor,
    of_rows: Rows,
    settings: Settings,
    token_mask: tuple[float, float],
    entropy_coef: float,
    need_hidden: bool,
    d_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """logp (R,), entropy (R,) and the gradient by each row's hidden state (R, H); adds to d_weight."""
    rows = row_backend(backend)
    logp, entropy = (torch.empty_like(scale) for _ in range(2))
    d_rows = scale.new_zeros((len(targets), hidden.shape[1]) if need_hidden else 0)
    tiles = Tiles(hidden, head, len(targets), keep=True, whole_rows=rows.WHOLE_ROWS)
    for part in tiles.row_parts():
        h = hidden.index_select(0, source[part])
        sums = RowSums.none_yet(scale[part], True)
        for tile, block in tiles.of_rows(targets[part], scale[part]):
            tiles.multiply(h, block, tile)
            rows.accumulate(tile, sums)
        true, true_slope = head.true_class(h, targets[part], scale[part])
        logp[part], origin, log_norm, entropy[part] = softmax(sums, true)
        slope = row_terms(settings, token_mask, logp[part], of_rows.at(part, scale.dtype)).slope
        bonus = () if entropy_coef == 0 else (entropy_coef * of_rows.token_weight[part], entropy[part])
        of = row_gradient(scale[part], true_slope, logp[part], origin, log_norm, slope, *bonus)
        for tile, block in tiles.of_rows(targets[part], scale[part]):
            d_logits = rows.gradient(tile, of, h.dtype)
            if need_hidden:
                add_product(d_rows[part], d_logits, block)
            if d_weight is not None:
                add_product(d_weight[tile.first : tile.first + len(block)], d_logits.t(), h)
    return logp, entropy, d_rows


def row_terms(settings: Settings, token_mask: tuple[float, float], logp: Tensor, of_rows: Rows) -> Terms:
    """Of rows whose weight is not 0. token_mask: bounds of w outside which a row has no surrogate."""
    credit, rollout, weight, old, ref = of_rows
    live = credit != 0
    w = torch.ones_like(logp)
    if old is not None:
        w = torch.where(live, old - rollout, 0).exp()
        live = live & ~((w < token_mask[0]) | (w > token_mask[1]))
    factor = torch.where(live, weight * w.clamp(max=settings.tis_cap), 0)
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
