"""How per-token losses become one number: a weight for every token, computed once from the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.checks import Checks, described

REDUCTIONS = ("problem_mean", "token_mean", "sequence_mean", "sequence_sum", "dr_grpo")


def token_weights(
    reduction: str,
    cu_seqlens: Tensor,
    mask: Tensor | None = None,
    *,
    n_problems: int | None = None,
    n_sequences: int | None = None,
    max_length: int | None = None,
) -> Tensor:
    """(T,) float64 weights w such that sum over tokens of w * loss is the reduction over the *whole* batch.

    Compute them before the batch is cut into micro-batches or shards and before tokens are pruned, and cut the weights
    with the tokens: then a step does not depend on how it was cut. cu_seqlens (S + 1,) int32 or int64: sequence i holds
    the tokens cu_seqlens[i] : cu_seqlens[i + 1]. mask (T,) bool: the tokens that count, None = all; others get 0.

    m = mask, n_i = counted tokens of sequence i, N = sum n_i, S' = `n_sequences` or else the sequences with n_i > 0,
    P = `n_problems` (live problems of the step), L = `max_length` (a constant, e.g. the limit of new tokens):

        reduction      weight        paper                       verl loss_agg_mode       TRL loss_type
        problem_mean   m / P         SPIRAL, arXiv 2606.23595
        token_mean     m / N         DAPO, arXiv 2503.14476      token-mean               dapo (bnpo: of a micro-batch)
        sequence_mean  m / (S' n_i)  GRPO, arXiv 2402.03300      seq-mean-token-mean      grpo
        sequence_sum   m / S'                                    seq-mean-token-sum
        dr_grpo        m / (S' L)    Dr. GRPO, arXiv 2503.20783  seq-mean-token-sum-norm  dr_grpo

    TRL counts sequences without a counted token in S': pass n_sequences=S. Older releases of verl divide by L alone in
    seq-mean-token-sum-norm: pass n_sequences=1. A batch with no counted token has weights 0.

    Raises ValueError where a number that the reduction needs is missing or no whole number above 0, or a shape does not
    fit.
    """
    checks = Checks("token_weights")
    checks.need(reduction in REDUCTIONS, f"no reduction {reduction!r}; there are: {', '.join(REDUCTIONS)}")
    for name, value, needed in (
        ("n_problems", n_problems, reduction == "problem_mean"),
        ("max_length", max_length, reduction == "dr_grpo"),
        ("n_sequences", n_sequences, False),
    ):
        checks.need(value is not None or not needed, f"{reduction} needs {name}")
        if value is not None:
            checks.whole(name, value, least=1)
    checks.tensors(cu_seqlens=cu_seqlens)
    if mask is not None:
        checks.tensors(mask=mask)
        fits = mask.dtype == torch.bool and mask.dim() == 1 and mask.device == cu_seqlens.device
        checks.need(fits, f"mask must be (T,) bool on {cu_seqlens.device}, got {described(mask)}")
    n_tokens = check_cu_seqlens("token_weights", cu_seqlens, None if mask is None else mask.shape[0])
    if mask is None:
        mask = torch.ones(n_tokens, dtype=torch.bool, device=cu_seqlens.device)
    counted = mask.double()
    sequence = sequence_of_token(cu_seqlens, n_tokens)
    sizes = counted.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence, counted)  # n_i
    sequences = float(n_sequences) if n_sequences is not None else (sizes > 0).sum().clamp(min=1)
    if reduction == "problem_mean":
        return counted / n_problems
    if reduction == "token_mean":
        return counted / sizes.sum().clamp(min=1)
    if reduction == "sequence_mean":
        return counted / (sequences * sizes.clamp(min=1))[sequence]
    if reduction == "sequence_sum":
        return counted / sequences
    return counted / (sequences * max_length)


def sequence_of_token(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """[0, 2, 2, 5] -> [0, 0, 2, 2, 2]."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=n_tokens)


def check_cu_seqlens(operation: str, cu_seqlens: Tensor, n_tokens: int | None) -> int:
    """The number of tokens; must be n_tokens unless None. Waits for the device. Raises ValueError."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        shape = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        raise ValueError(f"{operation}: cu_seqlens must be (S + 1,) int32 or int64, got {shape}")
    first, last = cu_seqlens[0], cu_seqlens[-1]
    falls = (cu_seqlens.diff() < 0).any().to(first.dtype)
    first, last, falls = torch.stack([first, last, falls]).tolist()
    if first != 0 or falls:
        raise ValueError(f"{operation}: cu_seqlens must start at 0 and never fall, it starts at {first}")
    if n_tokens is not None and last != n_tokens:
        raise ValueError(f"{operation}: cu_seqlens ends at {last}, but there are {n_tokens} tokens")
    return last
