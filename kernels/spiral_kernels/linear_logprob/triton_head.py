"""linear_logprob's forward on CUDA: no logits where no gradient is asked for, else chunks of rows."""

from __future__ import annotations

from torch import Tensor

from spiral_kernels.linear_logprob import triton_forward, triton_rows
from spiral_kernels.linear_logprob.head import Head
from spiral_kernels.linear_logprob.tiled import empty_results, softmax
from spiral_kernels.linear_logprob.tiles import RowSums, Tiles, product, rows_of


def forward(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    row_index: Tensor | None,
    scale: Tensor,
    with_entropy: bool,
    with_gradient: bool,
) -> tuple[Tensor, ...]:
    """As tiled.forward. With the gradient: a GEMM, one row kernel, a GEMM a chunk of rows (CHUNK_BYTES of logits)."""
    results = empty_results(hidden, targets, scale, with_entropy, with_gradient)
    logp, origin, log_norm, entropy, d_logp = results
    if not with_gradient:
        sums, true = triton_forward.row_sums(hidden, head, targets, row_index, scale, with_entropy)
        for result, found in zip(results, softmax(sums, true), strict=False):
            if found is not None:
                result.copy_(found)
        return results
    tiles = Tiles(hidden, head, len(targets), whole_rows=True)
    for part in tiles.row_parts():
        h, of_part = rows_of(hidden, row_index, part), (targets[part], scale[part])
        sums = RowSums.none_yet(scale[part], with_entropy)
        true, true_slope = head.true_class(h, *of_part)
        ((tile, weight),) = tiles.of_rows(*of_part)
        tiles.multiply(h, weight, tile)
        d_logits = triton_rows.sums_and_gradient(tile, sums, true, true_slope, h.dtype)
        d_logp[part] = product(d_logits, weight, scale.dtype)
        logp[part], origin[part], log_norm[part], spread = softmax(sums, true)
        if with_entropy:
            entropy[part] = spread
    return results
