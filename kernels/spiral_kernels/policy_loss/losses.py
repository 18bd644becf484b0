"""The losses of policy_loss and linear_policy_loss token by token: values and derivatives by the token's log-prob.

Derivatives are written out, so that a loss whose gradient must be known during the forward can use them, and so that a
ratio that overflows on the clipped side gives a gradient of 0 instead of inf * 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.checks import Checks

TOKEN_LOSSES = ("importance_sampling", "ppo_clip", "cispo", "reinforce")
KL_ESTIMATORS = ("k1", "k2", "k3")
CLIPPED = ("ppo_clip", "cispo", "gspo")


class Settings(NamedTuple):
    """Bounds of ratios and weights, `None` resolved: no lower bound is 0, no upper one infinity."""

    loss: str
    lower: float  # 1 - low
    upper: float  # 1 + high
    dual: float  # upper bound of the ratio where the credit is negative
    tis_cap: float
    kl_coef: float
    kl: str


class Surrogate(NamedTuple):
    """Each like the ratio. The loss of a token is weight * value."""

    value: Tensor
    derivative: Tensor  # of value by the logarithm of the ratio (reinforce, cispo: by the log-prob)
    below: Tensor  # the ratio lies below its lower bound
    above: Tensor


def surrogate(settings: Settings, log_ratio: Tensor, logp: Tensor, credit: Tensor) -> Surrogate:
    """What the loss makes of a token, before its weight; formulas in policy_loss's docstring."""
    ratio = log_ratio.exp()
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    if settings.loss == "reinforce":
        return Surrogate(-credit * logp, -credit, nothing, nothing)
    if settings.loss == "importance_sampling":
        value = -credit * ratio
        return Surrogate(value, value, nothing, nothing)
    if settings.loss == "cispo":
        below, above = ratio < settings.lower, ratio > settings.upper
        coefficient = -credit * ratio.clamp(settings.lower, settings.upper)
        return Surrogate(coefficient * logp, coefficient, below, above)
    gain = credit > 0
    ceiling = torch.full_like(ratio, settings.dual).masked_fill(gain, settings.upper)
    below, above = ~gain & (ratio < settings.lower), ratio > ceiling
    bounded = torch.where(below, settings.lower, torch.where(above, ceiling, ratio))
    value = -credit * bounded
    return Surrogate(value, torch.where(below | above, 0, value), below, above)


def kl_terms(kl: str, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || reference) at each token and its derivative; log_ratio = log policy - log reference."""
    if kl == "k1":
        return log_ratio, torch.ones_like(log_ratio)
    if kl == "k2":
        return log_ratio.square() / 2, log_ratio
    difference = torch.expm1(-log_ratio)
    return difference + log_ratio, -difference


def settings_of(
    checks: Checks,
    losses: tuple[str, ...],
    loss: str,
    clip: tuple[float | None, float | None] | None,
    dual_clip: float | None,
    tis_cap: float | None,
    kl_coef: float,
    kl: str,
    *,
    has_old: bool,
    has_ref: bool,
) -> Settings:
    """Checked. Raises ValueError with one line."""
    need = checks.need
    need(loss in losses, f"no loss {loss!r}; there are: {', '.join(losses)}")
    need(kl in KL_ESTIMATORS, f"no estimator kl={kl!r}; there are: {', '.join(KL_ESTIMATORS)}")
    kl_coef = checks.number("kl_coef", kl_coef)
    need(kl_coef == 0 or has_ref, "kl_coef is not 0: pass ref_logp")
    if tis_cap is not None:
        need(has_old, "tis_cap bounds exp(old_logp - rollout_logp), which is 1 without old_logp: pass it")
        tis_cap = checks.number("tis_cap", tis_cap, above=0, finite=False)
    low, high = (None, None) if clip is None else checks.pair("clip", clip)
    if loss in CLIPPED:
        need(low is not None or high is not None, f"loss {loss!r} needs clip=(low, high), e.g. (0.2, 0.28)")
        low = None if low is None else checks.number("clip: low", low)
        high = None if high is None else checks.number("clip: high", high, finite=False)
        need(low is None or 0 <= low <= 1, "clip: low must lie in 0 .. 1")
        need(high is None or high >= 0, "clip: high must be >= 0")
    else:
        need(clip is None, f"loss {loss!r} clips nothing; leave clip out")
    if dual_clip is not None:
        need(loss in ("ppo_clip", "gspo"), f"dual_clip belongs to ppo_clip and gspo, not {loss!r}")
        dual_clip = checks.number("dual_clip", dual_clip, above=1, finite=False)
    return Settings(
        loss,
        0.0 if low is None else 1 - low,
        torch.inf if high is None else 1 + high,
        torch.inf if dual_clip is None else dual_clip,
        torch.inf if tis_cap is None else tis_cap,
        kl_coef,
        kl,
    )


def mask_bounds(checks: Checks, name: str, bounds: tuple[float, float] | None, *, has_old: bool) -> tuple[float, float]:
    """Of pi_old / mu, within which a token or a sequence keeps its surrogate. Raises ValueError with one line."""
    if bounds is None:
        return 0.0, torch.inf
    checks.need(has_old, f"{name} looks at old_logp - rollout_logp: pass old_logp")
    return checks.bounds(name, bounds)
