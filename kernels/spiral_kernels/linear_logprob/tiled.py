"""Log-probs of an LM head, and their gradient, over tiles of rows x vocabulary: the full logits never exist.

A tile of logits comes from a GEMM into one buffer that every tile reuses; a row backend does the softmax arithmetic on
it. Of each row a forward keeps sums over all classes but the true one (RowSums); the true class's logit is formed
apart, in the accumulation dtype. So log p = -log(1 + exp(others - true)) keeps its relative precision as p -> 1, and so
does the true class's gradient 1 - p.

With a frozen weight the forward also leaves the gradient of each row's log-prob by its hidden state, (R, H): a tile's
exponentials are multiplied with the weight while they are in cache, before the row's sum is known, as flash attention
does with its values. The backward then only scales: two GEMMs in all. With a trained weight the backward recomputes the
logits.

Accumulation dtype: float64 for float64 inputs, else float32. GEMMs run in the input dtype. bfloat16: logits are rounded
to bfloat16 on CPU (its GEMM has no float32 output), float32 on CUDA; exponentials or gradient of a tile are rounded to
bfloat16 for the GEMMs that follow, whose results are summed in float32.

Memory beyond inputs and outputs, C rows and B vocabulary entries per tile (C * B <= TILE_ELEMENTS of the device):
a few tiles, 3 (C, H) buffers; the (R, H) gradient in the accumulation dtype; for bfloat16 also d_weight, and with
row_index d_hidden, once in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.linear_logprob.head import Head
from spiral_kernels.linear_logprob.tiles import (
    RowBackend,
    RowSums,
    Tiles,
    add_product,
    row_gradient,
    rows_of,
)


def forward(
    rows: RowBackend,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    row_index: Tensor | None,
    scale: Tensor,
    with_entropy: bool,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logp, origin, log_norm, entropy, each (R,), and the gradient of logp by each row's hidden state (R, H).

    scale (R,) = 1 / temperature. Entropy and gradient are (0,) where not asked for. The log-sum-exp is origin +
    log_norm: in two parts, a large common offset of the logits costs no digits.
    """
    results = empty_results(hidden, targets, scale, with_entropy, with_gradient)
    logp, origin, log_norm, entropy, d_logp = results
    tiles = Tiles(hidden, head, len(targets))
    for part in tiles.row_parts():
        h, of_part = rows_of(hidden, row_index, part), (targets[part], scale[part])
        sums = RowSums.none_yet(scale[part], with_entropy)
        weights = torch.zeros(h.shape, dtype=scale.dtype, device=h.device)  # sum of exp(l - origin) w, other classes
        for tile, block in tiles.of_rows(*of_part):
            tiles.multiply(h, block, tile)
            if not with_gradient:
                rows.accumulate(tile, sums)
                continue
            factor = rows.exponentials(tile, sums)
            if factor.is_cuda or (factor != 1).any():
                weights *= factor[:, None]
            add_product(weights, tile.logits, block)
        true, true_slope = head.true_class(h, *of_part)
        logp[part], origin[part], log_norm[part], spread = softmax(sums, true)
        if with_entropy:
            entropy[part] = spread
        if with_gradient:
            of_true = -torch.expm1(logp[part])
            if true_slope is not None:
                of_true *= true_slope
            share = (sums.origin - origin[part] - log_norm[part]).exp()
            weights.mul_(-share[:, None]).addcmul_(of_true[:, None], head.weight[targets[part]].to(scale.dtype))
            torch.mul(weights, scale[part, None], out=d_logp[part])
    return results


def empty_results(hidden, targets, scale, with_entropy: bool, with_gradient: bool) -> tuple[Tensor, ...]:
    """logp, origin, log_norm, entropy and the gradient by the hidden state."""
    n_rows = targets.shape[0]
    vectors = (scale.new_empty(n_rows) for _ in range(3))
    shape = (n_rows, hidden.shape[1]) if with_gradient else (0,)
    return *vectors, scale.new_empty(n_rows if with_entropy else 0), scale.new_empty(shape)


def softmax(sums: RowSums, true: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """logp, origin, log_norm, entropy (None without sums.weighted) of rows, each (C,): from the sums over the other
    classes and the true class's l. The log-sum-exp is origin + log_norm."""
    log_sum = sums.sum.log()
    logp = -torch.logaddexp(sums.origin - true + log_sum, torch.zeros_like(true))
    origin = torch.maximum(sums.origin, true)
    log_norm = torch.logaddexp(sums.origin - origin + log_sum, true - origin)
    if sums.weighted is None:
        return logp, origin, log_norm, None
    # the entropy is the sum over classes of p (lse - l): no term is negative, so nothing cancels as p -> 1
    lse_minus_others = (origin - sums.origin + log_norm - sums.weighted / sums.sum).clamp(min=0)
    spread = torch.where(sums.sum > 0, -torch.expm1(logp) * lse_minus_others, 0)
    return logp, origin, log_norm, spread - torch.where(logp > -torch.inf, logp.exp() * logp, 0)


def backward(
    rows: RowBackend,
    grad_logp: Tensor,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    row_index: Tensor | None,
    scale: Tensor,
    origin: Tensor,
    log_norm: Tensor,
    logp: Tensor,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """d_hidden (N, H) and d_weight (V, H) in the inputs' dtype, the logits computed again; (0,) for one not needed."""
    grad_logp = grad_logp.to(scale.dtype).contiguous()
    d_logp = scale.new_zeros((len(targets), hidden.shape[1]) if need_hidden else 0)
    d_weight = torch.zeros(head.weight.shape if need_weight else 0, dtype=scale.dtype, device=hidden.device)
    tiles = Tiles(hidden, head, len(targets), whole_rows=rows.WHOLE_ROWS)
    for part in tiles.row_parts():
        h = rows_of(hidden, row_index, part)
        _, true_slope = (None, None) if head.soft_cap is None else head.true_class(h, targets[part], scale[part])
        of = row_gradient(scale[part], true_slope, logp[part], origin[part], log_norm[part], grad_logp[part])
        for tile, block in tiles.of_rows(targets[part], scale[part]):
            tiles.multiply(h, block, tile)
            d_logits = rows.gradient(tile, of, h.dtype)
            if need_hidden:
                add_product(d_logp[part], d_logits, block)
            if need_weight:
                add_product(d_weight[tile.first : tile.first + len(block)], d_logits.t(), h)
    empty = hidden.new_empty(0)
    d_hidden = sum_by_hidden_row(d_logp, hidden.shape, hidden.dtype, row_index) if need_hidden else empty
    return d_hidden, d_weight.to(head.weight.dtype)


def sum_by_hidden_row(gradients: Tensor, shape: torch.Size, dtype: torch.dtype, row_index: Tensor | None) -> Tensor:
    """d_hidden (N, H) of `dtype` from one gradient a row (R, H)."""
    if row_index is None:
        return gradients.to(dtype)
    return gradients.new_zeros(shape).index_add_(0, row_index, gradients).to(dtype)
