"""policy_loss over all packed tokens at once, with its gradient: plain torch operations, any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.policy_loss.losses import Settings, kl_terms, surrogate
from spiral_kernels.policy_loss.reductions import sequence_of_token


class Masks(NamedTuple):
    """Bounds within which a token or a sequence keeps its surrogate."""

    token_low: float
    token_high: float
    sequence_low: float
    sequence_high: float
    off_policy: float


def policy_loss(
    logp: Tensor,
    rollout_logp: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    token_weight: Tensor | None,
    settings: Settings,
    masks: Masks,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss (), d_logp (T,) or (0,) without gradient, and statistics (6,) in the order of PolicyLoss."""
    dtype, n_tokens = logp.dtype, logp.shape[0]
    sequence = sequence_of_token(cu_seqlens, n_tokens)
    weight = torch.ones_like(logp) if token_weight is None else token_weight.to(dtype)
    counts = weight != 0

    def sums(values: Tensor) -> Tensor:
        """(S,) over each sequence's tokens."""
        total = torch.zeros(len(advantages), dtype=torch.float64, device=logp.device)
        return total.index_add(0, sequence, values.double())

    size = sums(counts).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        """(T,) over those tokens of each token's sequence that count."""
        return (sums(torch.where(counts, values, 0)) / size)[sequence].to(dtype)

    def over(where: Tensor, values: Tensor) -> Tensor:
        """Sum of the values there, float64."""
        return torch.where(where, values, 0).sum(dtype=torch.float64)

    credit = advantages.to(dtype)[sequence]
    rollout = rollout_logp.to(dtype)
    old = rollout if old_logp is None else old_logp.to(dtype)
    log_w = old - rollout if old_logp is not None else torch.zeros_like(logp)

    credited = kept = counts & (credit != 0)
    if masks.sequence_low > 0 or masks.sequence_high < torch.inf:
        w = mean(log_w).exp()
        kept = kept & ~((w < masks.sequence_low) | (w > masks.sequence_high))
    if masks.off_policy < torch.inf:
        kept = kept & ~((credit < 0) & (mean(rollout - logp) > masks.off_policy))
    w = torch.where(kept, log_w, 0).exp()
    live = kept & ~((w < masks.token_low) | (w > masks.token_high))
    w = w.clamp(max=settings.tis_cap)

    sequence_level = settings.loss == "gspo"
    log_ratio = torch.where(kept if sequence_level else live, logp - old, 0)
    if sequence_level:
        log_ratio = mean(log_ratio)
    each = surrogate(settings, log_ratio, torch.where(live, logp, 0), credit)
    factor = torch.where(live, weight * torch.where(live, w, 0), 0)
    total = over(live, factor * each.value)

    kl_mean = total.new_zeros(())
    d_kl = None
    if ref_logp is not None:
        value, slope = kl_terms(settings.kl, torch.where(counts, logp - ref_logp.to(dtype), 0))
        kl_mean = over(counts, value) / counts.sum().clamp(min=1)
        if settings.kl_coef != 0:
            kl_weight = weight * settings.kl_coef
            total = total + over(counts, kl_weight * value)
            d_kl = torch.where(counts, kl_weight * slope, 0)

    d_logp = logp.new_empty(0)
    if with_gradient:
        d_logp = torch.where(live, factor * each.derivative, 0)
        if sequence_level:  # s moves with the log-prob of every token that counts
            d_logp = torch.where(kept, mean(d_logp), 0)
        if d_kl is not None:
            d_logp = d_logp + d_kl

    ratio, n_live, n_credited = log_ratio.exp(), live.sum().double(), credited.sum()
    none = n_live == 0
    share = n_live.clamp(min=1)
    highest = torch.cat([torch.where(live, ratio, 0), ratio.new_zeros(1)]).amax()
    statistics = [
        torch.where(none, 1, over(live, ratio) / share),
        torch.where(none, 1, highest),
        (each.below & live).sum() / share,
        (each.above & live).sum() / share,
        (n_credited - n_live) / n_credited.clamp(min=1),
        kl_mean,
    ]
    return total.to(dtype), d_logp, torch.stack([x.to(dtype) for x in statistics])
