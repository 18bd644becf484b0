"""policy_loss in Triton: one program per sequence gives its loss, gradient and sums; a second kernel adds the sums up.

Everything is summed in a fixed order and no two programs write the same number: two runs are bit-equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spiral_kernels.policy_loss.losses import Settings
from spiral_kernels.policy_loss.packed import Masks

BLOCK = 512  # tokens of a sequence handled at once by a program
WARPS = 4
ROWS = 64  # sequences added up at once
SUMS = tl.constexpr(9)  # of a sequence: loss, ratio, highest ratio, below, above, live, credited, KL, tokens that count


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
    """As packed.policy_loss."""
    logp = logp.contiguous()
    n_sequences = advantages.shape[0]
    d_logp = torch.empty_like(logp) if with_gradient else logp.new_empty(0)
    total, statistics = logp.new_empty(()), logp.new_empty(6)
    sums = torch.empty(n_sequences, SUMS.value, dtype=torch.float64, device=logp.device)
    sequence_mask = masks.sequence_low > 0 or masks.sequence_high < torch.inf
    with torch.cuda.device_of(logp):
        if n_sequences:
            sequence_kernel[(n_sequences,)](
                logp,
                rollout_logp.contiguous(),
                None if old_logp is None else old_logp.contiguous(),
                None if ref_logp is None else ref_logp.contiguous(),
                None if token_weight is None else token_weight.contiguous(),
                advantages.contiguous(),
                cu_seqlens.contiguous(),
                d_logp,
                sums,
                settings.lower,
                settings.upper,
                settings.dual,
                settings.tis_cap,
                settings.kl_coef,
                *masks,
                LOSS=settings.loss,
                KL=settings.kl,
                SEQUENCE_MASK=sequence_mask,
                OFF_POLICY_MASK=masks.off_policy < torch.inf,
                WITH_GRADIENT=with_gradient,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        finish_kernel[(1,)](sums, total, statistics, n_sequences, ROWS=ROWS, num_warps=WARPS)
    return total, d_logp, statistics


@triton.jit
def sequence_kernel(
    logp_ptr,  # (T,), as all of tokens
    rollout_ptr,
    old_ptr,  # None: the sampler is the proximal policy
    ref_ptr,  # None: no KL
    weight_ptr,  # None: 1
    credit_ptr,  # (S,)
    cu_seqlens_ptr,  # (S + 1,)
    d_logp_ptr,
    sums_ptr,  # (S, SUMS) float64
    lower: tl.float64,
    upper: tl.float64,
    dual: tl.float64,
    tis_cap: tl.float64,
    kl_coef: tl.float64,
    token_low: tl.float64,
    token_high: tl.float64,
    sequence_low: tl.float64,
    sequence_high: tl.float64,
    off_policy: tl.float64,
    LOSS: tl.constexpr,
    KL: tl.constexpr,
    SEQUENCE_MASK: tl.constexpr,
    OFF_POLICY_MASK: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The steps of packed.py for one sequence. A token of weight 0 is never loaded."""
    sequence = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = logp_ptr.dtype.element_ty
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    credit = tl.load(credit_ptr + sequence).to(dtype)

    keep = credit != 0  # whether the sequence has a surrogate at all
    log_s = tl.zeros((), dtype)  # gspo: the mean of its log ratios
    if SEQUENCE_MASK or OFF_POLICY_MASK or LOSS == "gspo":
        size = tl.zeros((), tl.float64)
        log_w_sum = tl.zeros((), tl.float64)
        behind_sum = tl.zeros((), tl.float64)
        log_ratio_sum = tl.zeros((), tl.float64)
        for first in range(start, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            weight, counts = load_weight(weight_ptr, token, end, dtype)
            logp = tl.load(logp_ptr + token, mask=counts, other=0.0)
            rollout = tl.load(rollout_ptr + token, mask=counts, other=0.0).to(dtype)
            old = load_old(old_ptr, rollout, token, counts)
            size += tl.sum(counts.to(tl.float64), 0)
            log_w_sum += tl.sum((old - rollout).to(tl.float64), 0)
            behind_sum += tl.sum((rollout - logp).to(tl.float64), 0)
            log_ratio_sum += tl.sum((logp - old).to(tl.float64), 0)
        size = tl.maximum(size, 1.0)
        if SEQUENCE_MASK:
            mean_w = tl.exp((log_w_sum / size).to(dtype))
            outside = (mean_w < in_dtype(sequence_low, dtype)) | (mean_w > in_dtype(sequence_high, dtype))
            keep = keep & (outside == 0)
        if OFF_POLICY_MASK:
            behind = (behind_sum / size).to(dtype)
            keep = keep & (((credit < 0) & (behind > in_dtype(off_policy, dtype))) == 0)
        log_s = tl.where(keep, (log_ratio_sum / size).to(dtype), 0.0)

    loss_sum = tl.zeros((), tl.float64)
    ratio_sum = tl.zeros((), tl.float64)
    highest = tl.zeros((), dtype)
    n_below = tl.zeros((), tl.float64)
    n_above = tl.zeros((), tl.float64)
    n_live = tl.zeros((), tl.float64)
    n_counts = tl.zeros((), tl.float64)
    kl_sum = tl.zeros((), tl.float64)
    d_log_s = tl.zeros((), tl.float64)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        weight, counts = load_weight(weight_ptr, token, end, dtype)
        logp = tl.load(logp_ptr + token, mask=counts, other=0.0)
        kept = tl.where(keep, counts, False)
        rollout = tl.load(rollout_ptr + token, mask=kept, other=0.0).to(dtype)
        old = load_old(old_ptr, rollout, token, kept)
        w = tl.exp(old - rollout)
        live = kept & (((w < in_dtype(token_low, dtype)) | (w > in_dtype(token_high, dtype))) == 0)
        w = tl.where(w > in_dtype(tis_cap, dtype), in_dtype(tis_cap, dtype), w)
        if LOSS == "gspo":
            log_ratio = tl.zeros((BLOCK,), dtype) + log_s
        else:
            log_ratio = tl.where(live, logp - old, 0.0)
        ratio = tl.exp(log_ratio)
        value, derivative, below, above = surrogate(
            ratio,
            tl.where(live, logp, 0.0),
            credit,
            in_dtype(lower, dtype),
            in_dtype(upper, dtype),
            in_dtype(dual, dtype),
            LOSS,
        )
        factor = weight * w
        loss_sum += tl.sum(tl.where(live, factor * value, 0.0).to(tl.float64), 0)
        d_surrogate = tl.where(live, factor * derivative, 0.0)
        ratio_sum += tl.sum(tl.where(live, ratio, 0.0).to(tl.float64), 0)
        highest = tl.maximum(highest, tl.max(tl.where(live, ratio, 0.0), 0))
        n_below += tl.sum((below & live).to(tl.float64), 0)
        n_above += tl.sum((above & live).to(tl.float64), 0)
        n_live += tl.sum(live.to(tl.float64), 0)
        n_counts += tl.sum(counts.to(tl.float64), 0)
        if ref_ptr is not None:
            kl, d_kl = kl_terms(logp - tl.load(ref_ptr + token, mask=counts, other=0.0).to(dtype), KL)
            kl_weight = weight * in_dtype(kl_coef, dtype)
            kl_sum += tl.sum(tl.where(counts, kl, 0.0).to(tl.float64), 0)
            if kl_coef != 0:
                loss_sum += tl.sum(tl.where(counts, kl_weight * kl, 0.0).to(tl.float64), 0)
                d_surrogate += tl.where(counts, kl_weight * d_kl, 0.0)
        if WITH_GRADIENT and LOSS != "gspo":
            tl.store(d_logp_ptr + token, d_surrogate, mask=token < end)
        if LOSS == "gspo":
            d_log_s += tl.sum(tl.where(live, factor * derivative, 0.0).to(tl.float64), 0)

    if WITH_GRADIENT and LOSS == "gspo":  # s moves with the log-prob of every token that counts
        each = tl.where(keep, (d_log_s / tl.maximum(n_counts, 1.0)).to(dtype), 0.0)
        for first in range(start, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            weight, counts = load_weight(weight_ptr, token, end, dtype)
            d_logp = tl.where(counts, each, 0.0)
            if ref_ptr is not None:
                if kl_coef != 0:
                    logp = tl.load(logp_ptr + token, mask=counts, other=0.0)
                    ref = tl.load(ref_ptr + token, mask=counts, other=0.0).to(dtype)
                    kl, d_kl = kl_terms(logp - ref, KL)
                    d_logp += tl.where(counts, weight * in_dtype(kl_coef, dtype) * d_kl, 0.0)
            tl.store(d_logp_ptr + token, d_logp, mask=token < end)

    n_credited = tl.where(credit != 0, n_counts, 0.0)
    sums_ptr += sequence * SUMS
    tl.store(sums_ptr, loss_sum)
    tl.store(sums_ptr + 1, ratio_sum)
    tl.store(sums_ptr + 2, highest.to(tl.float64))
    tl.store(sums_ptr + 3, n_below)
    tl.store(sums_ptr + 4, n_above)
    tl.store(sums_ptr + 5, n_live)
    tl.store(sums_ptr + 6, n_credited)
    tl.store(sums_ptr + 7, kl_sum)
    tl.store(sums_ptr + 8, n_counts)


@triton.jit
def finish_kernel(sums_ptr, loss_ptr, statistics_ptr, n_sequences, ROWS: tl.constexpr):
    """The sums over all sequences, and what PolicyLoss makes of them."""
    dtype: tl.constexpr = loss_ptr.dtype.element_ty
    column = tl.arange(0, 16)
    sums = tl.zeros((ROWS, 16), tl.float64)
    for first in range(0, n_sequences, ROWS):
        sequence = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (sequence < n_sequences) & (column < SUMS)[None, :]
        added = tl.load(sums_ptr + sequence * SUMS + column[None, :], mask=mask, other=0.0)
        sums = tl.where((column == 2)[None, :], tl.maximum(sums, added), sums + added)
    highest = tl.max(tl.max(tl.where((column == 2)[None, :], sums, 0.0), 0), 0)
    totals = tl.sum(sums, 0)
    n_live = pick(totals, 5)
    n_credited = pick(totals, 6)
    ratio = pick(totals, 1)
    highest = tl.where(ratio != ratio, ratio, highest)  # a maximum forgets NaN, a sum does not
    none = n_live == 0
    share = tl.maximum(n_live, 1.0)
    tl.store(loss_ptr, pick(totals, 0).to(dtype))
    tl.store(statistics_ptr, tl.where(none, 1.0, ratio / share).to(dtype))
    tl.store(statistics_ptr + 1, tl.where(none, 1.0, highest).to(dtype))
    tl.store(statistics_ptr + 2, (pick(totals, 3) / share).to(dtype))
    tl.store(statistics_ptr + 3, (pick(totals, 4) / share).to(dtype))
    tl.store(statistics_ptr + 4, ((n_credited - n_live) / tl.maximum(n_credited, 1.0)).to(dtype))
    tl.store(statistics_ptr + 5, (pick(totals, 7) / tl.maximum(pick(totals, 8), 1.0)).to(dtype))


@triton.jit
def pick(totals, i: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 16) == i, totals, 0.0), 0)


@triton.jit
def load_weight(weight_ptr, token, end, dtype: tl.constexpr):
    """Weights of the tokens, and which of them count: in the sequence and of a weight that is not 0."""
    inside = token < end
    if weight_ptr is None:
        weight = tl.where(inside, 1.0, 0.0).to(dtype)
    else:
        weight = tl.load(weight_ptr + token, mask=inside, other=0).to(dtype)
    return weight, inside & (weight != 0)


@triton.jit
def load_old(old_ptr, rollout, token, mask):
    """Log-probs of the proximal policy: the sampler's where none is given."""
    if old_ptr is None:
        old = rollout
    else:
        old = tl.load(old_ptr + token, mask=mask, other=0.0).to(rollout.dtype)
    return old


@triton.jit
def in_dtype(number, dtype: tl.constexpr):
    return tl.full((), number, dtype)


@triton.jit
def surrogate(ratio, logp, credit, lower, upper, dual, LOSS: tl.constexpr):
    """losses.surrogate: value, derivative, below, above."""
    if LOSS == "reinforce":
        value = -credit * logp
        derivative = -credit + tl.zeros_like(ratio)
        below = ratio != ratio
        below = below & (below == 0)
        above = below
    elif LOSS == "importance_sampling":
        value = -credit * ratio
        derivative = value
        below = ratio != ratio
        below = below & (below == 0)
        above = below
    elif LOSS == "cispo":
        below = ratio < lower
        above = ratio > upper
        derivative = -credit * tl.where(below, lower, tl.where(above, upper, ratio))
        value = derivative * logp
    else:
        ceiling = tl.where(credit > 0, upper, dual)
        below = ((credit > 0) == 0) & (ratio < lower)
        above = ratio > ceiling
        value = -credit * tl.where(below, lower, tl.where(above, ceiling, ratio))
        derivative = tl.where(below | above, 0.0, value)
    return value, derivative, below, above


@triton.jit
def kl_terms(log_ratio, KL: tl.constexpr):
    """losses.kl_terms: the estimate and its derivative."""
    if KL == "k1":
        value = log_ratio
        derivative = tl.zeros_like(log_ratio) + 1.0
    elif KL == "k2":
        value = log_ratio * log_ratio / 2
        derivative = log_ratio
    else:
        difference = expm1(-log_ratio)
        value = difference + log_ratio
        derivative = -difference
    return value, derivative


@triton.jit
def expm1(x):
    """exp(x) - 1; near 0 by its series, where the difference would cancel (the last term: 0.5^16 / 17! < 1e-19)."""
    near = tl.abs(x) < 0.5
    small = tl.where(near, x, 0.0)
    series = tl.zeros_like(x) + 1.0
    for i in tl.static_range(16):
        series = 1.0 + small * series * (1.0 / (17 - i))
    return tl.where(near, small * series, tl.exp(x) - 1.0)
