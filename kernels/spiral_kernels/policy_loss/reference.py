"""The truth: one sequence after the other, the papers' formulas, float64, gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.policy_loss.losses import Settings
from spiral_kernels.policy_loss.packed import Masks


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
) -> tuple[Tensor, Tensor]:
    """loss () and statistics (6,) in the order of PolicyLoss, float64."""
    lp = logp.double()
    lp_rollout = rollout_logp.double()
    lp_old = lp_rollout if old_logp is None else old_logp.double()
    weight = torch.ones_like(lp) if token_weight is None else token_weight.double()
    zero = lp.new_zeros(())
    total = lp[:0].sum()  # 0, with a gradient even where no token counts
    n_credited, ratios, below, above, kls = 0, [], [], [], []
    for i, (start, end) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)):
        t = torch.arange(start, end, device=lp.device)
        t = t[weight[t] != 0]  # the sequence's tokens that count
        if len(t) == 0:
            continue
        if ref_logp is not None:
            kls.append(_kl(settings.kl, lp[t] - ref_logp.double()[t]))
            if settings.kl_coef != 0:
                total = total + settings.kl_coef * (weight[t] * kls[-1]).sum()
        A = advantages[i].double()
        if A == 0:
            continue
        n_credited += len(t)
        w = (lp_old[t] - lp_rollout[t]).exp()
        geometric = w.log().mean().exp()
        if geometric < masks.sequence_low or geometric > masks.sequence_high:
            continue
        if A < 0 and (lp_rollout[t] - lp[t]).mean() > masks.off_policy:
            continue
        log_ratio = lp[t] - lp_old[t]
        if settings.loss == "gspo":
            log_ratio = log_ratio.mean().expand(len(t))
        inside = ~((w < masks.token_low) | (w > masks.token_high))
        t, w, log_ratio = t[inside], w[inside].clamp(max=settings.tis_cap), log_ratio[inside]
        r = log_ratio.exp()
        total = total + (weight[t] * w * _surrogate(settings, r, lp[t], A)).sum()
        ratios.append(r.detach())
        bounded_above = settings.dual if A < 0 and settings.loss != "cispo" else settings.upper
        bounded_below = 0.0 if A > 0 and settings.loss != "cispo" else settings.lower
        below.append(r < bounded_below)
        above.append(r > bounded_above)

    def mean(parts: list[Tensor], of_none: float) -> Tensor:
        joined = torch.cat(parts).double() if parts else zero.new_empty(0)
        return joined.mean() if len(joined) else zero + of_none

    live = torch.cat(ratios) if ratios else zero.new_empty(0)
    statistics = [
        mean(ratios, 1.0),
        live.max() if len(live) else zero + 1,
        mean(below, 0.0),
        mean(above, 0.0),
        zero + (n_credited - len(live)) / max(n_credited, 1),
        mean(kls, 0.0),
    ]
    return total, torch.stack(statistics).detach()


def _surrogate(settings: Settings, r: Tensor, lp: Tensor, A: Tensor) -> Tensor:
    if settings.loss == "importance_sampling":
        return -r * A
    if settings.loss == "reinforce":
        return -lp * A
    # the gradient on a bound is the ratio's own, which clamp's is not from torch 2.14 on
    within = (r >= settings.lower) & (r <= settings.upper)
    clipped = torch.where(within, r, r.detach().clamp(settings.lower, settings.upper))
    if settings.loss == "cispo":
        return -clipped.detach() * A * lp
    worst = torch.minimum(r * A, clipped * A)
    return -torch.maximum(worst, settings.dual * A) if A < 0 else -worst


def _kl(kl: str, d: Tensor) -> Tensor:
    return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kl]
