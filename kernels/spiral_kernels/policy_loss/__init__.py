"""Policy-gradient losses from log-probs: packed sequences, one credit each, gradient by the log-probs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.checks import Checks, described
from spiral_kernels.derivatives import first_only
from spiral_kernels.dispatch import choose_backend, register_backends, triton_unavailable
from spiral_kernels.policy_loss import packed, reference
from spiral_kernels.policy_loss.losses import TOKEN_LOSSES, mask_bounds, settings_of
from spiral_kernels.policy_loss.reductions import check_cu_seqlens, token_weights

__all__ = ["LOSSES", "PolicyLoss", "policy_loss", "token_weights"]

LOSSES = (*TOKEN_LOSSES, "gspo")
DTYPES = (torch.float32, torch.float64)


class PolicyLoss(NamedTuple):
    """Scalars of logp's dtype; only `loss` carries a gradient. A live token counts, has a credit and is not masked."""

    loss: Tensor
    ratio_mean: Tensor  # r over live tokens (gspo: s); 1 if none is live
    ratio_max: Tensor
    clip_low: Tensor  # share of the live tokens whose ratio lies below the lower bound that holds for them
    clip_high: Tensor  # ... above the upper bound: 1 + high, or dual_clip where the credit is negative
    masked: (
        Tensor  # share of the tokens that count and have a credit which token_mask, sequence_mask, off_policy_mask drop
    )
    kl: Tensor  # mean over the tokens that count; 0 without ref_logp


def policy_loss(
    logp: Tensor,
    rollout_logp: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    token_weight: Tensor | None = None,
    loss: str = "importance_sampling",
    clip: tuple[float | None, float | None] | None = None,
    dual_clip: float | None = None,
    tis_cap: float | None = None,
    token_mask: tuple[float, float] | None = None,
    sequence_mask: tuple[float, float] | None = None,
    off_policy_mask: float | None = None,
    kl_coef: float = 0.0,
    kl: str = "k3",
) -> PolicyLoss:
    """sum over tokens t of token_weight_t * (w_t * surrogate_t + kl_coef * KL_t).

    T tokens of S sequences packed one after the other: sequence i holds the tokens cu_seqlens[i] : cu_seqlens[i + 1]
    and has the credit A = advantages[i]. Any number of sequences, empty ones too.

    logp (T,) float32 or float64: log pi, the policy that is trained; the only input with a gradient.
    rollout_logp (T,): log mu, the sampler. old_logp (T,): log pi_old, the proximal policy, from which r is measured;
    None = the sampler itself. ref_logp (T,): log pi_ref, for the KL only. token_weight (T,): the reduction, see
    `token_weights`; None = 1. advantages (S,). These may have any real dtype; cu_seqlens (S + 1,) int32 or int64.
    Arithmetic is in logp's dtype, sums over tokens in float64.

    With r = pi / pi_old (with pi_old = mu where old_logp is None) and sg = no gradient flows:

        importance_sampling  -r A                                     token-level weights, arXiv 2606.23595
        reinforce            -log pi A                                Williams 1992
        ppo_clip             -min(r A, clip(r, 1 - low, 1 + high) A)  arXiv 1707.06347; low != high: DAPO, 2503.14476
          with dual_clip c   A < 0: -max(that minimum, c A)           arXiv 1912.09729; verl clip_ratio_c, TRL delta
        cispo                -sg(clip(r, 1 - low, 1 + high)) A log pi arXiv 2506.13585
        gspo                 ppo_clip with one ratio per sequence,    arXiv 2507.18071; GSPO-token is the same where a
                             s = exp(mean over its tokens of log r)   sequence's tokens have equal weights w

    clip = (low, high), either None for no such bound. A ratio on the bound is not clipped.

    The importance weight w = pi_old / mu (no gradient) corrects for a proximal policy that is not the sampler
    (decoupled PPO, arXiv 2110.00641); 1 where old_logp is None, since r then holds mu already.
        tis_cap          w <- min(w, tis_cap)                         truncated importance sampling (TIS),
                                                                      fengyao.notion.site/off-policy-rl, verl, TRL
        token_mask       (low, high): no surrogate where w is outside IcePop, arXiv 2510.18855
        sequence_mask    (low, high): none for a sequence whose geometric mean exp(mean log w) is outside
        off_policy_mask  delta: none for a sequence with A < 0 and mean(log mu - log pi) > delta: arXiv 2512.02556
    To hold the policy of this very update against the sampler, pass old_logp=logp.detach(): r is 1, w is pi / mu.

    KL_t estimates KL(pi || pi_ref) from d = log pi - log pi_ref (joschu.net/blog/kl-approx.html):
        k1  d       gradient of expectation 0: to watch, not to train     k2  d^2 / 2     k3  exp(-d) - 1 + d
    It is that of the tokens as they came, with no importance weight. Masks do not touch it, nor does a credit of 0.

    What is exactly 0: a token of weight 0 does not count at all, its numbers are never read (they may be NaN), it is in
    no mean over a sequence; a sequence of credit 0 has no surrogate, whatever its log-probs. Elsewhere a number that is
    not finite shows in the loss; a ratio that overflows on its clipped side has gradient 0.

    Raises ValueError on shapes, dtypes, devices or settings that do not fit, BackendError if a forced backend cannot
    serve. Waits for the device once, to check cu_seqlens. Deterministic; the backend `torch` on CUDA only under
    torch.use_deterministic_algorithms. A compiled function can hold it. Differentiating the gradient raises
    RuntimeError.
    """
    checks = Checks("policy_loss")
    settings = settings_of(
        checks,
        LOSSES,
        loss,
        clip,
        dual_clip,
        tis_cap,
        kl_coef,
        kl,
        has_old=old_logp is not None,
        has_ref=ref_logp is not None,
    )
    masks = packed.Masks(
        *mask_bounds(checks, "token_mask", token_mask, has_old=old_logp is not None),
        *mask_bounds(checks, "sequence_mask", sequence_mask, has_old=old_logp is not None),
        torch.inf if off_policy_mask is None else checks.number("off_policy_mask", off_policy_mask),
    )
    _check(
        checks,
        logp,
        cu_seqlens,
        advantages,
        rollout_logp=rollout_logp,
        old_logp=old_logp,
        ref_logp=ref_logp,
        token_weight=token_weight,
    )
    tensors = logp, rollout_logp, advantages, cu_seqlens, old_logp, ref_logp, token_weight
    if choose_backend("policy_loss", logp.device, logp.dtype) == "reference":
        check_cu_seqlens("policy_loss", cu_seqlens, logp.shape[0])
        total, statistics = reference.policy_loss(*tensors, settings, masks)
        total, statistics = total.to(logp.dtype), statistics.to(logp.dtype)
    else:
        with_gradient = logp.requires_grad and torch.is_grad_enabled()
        total, _, statistics = torch.ops.spiral_kernels.policy_loss(*tensors, *settings, *masks, with_gradient)
    return PolicyLoss(total, *statistics.unbind())


def _check(checks: Checks, logp: Tensor, cu_seqlens: Tensor, advantages: Tensor, **of_tokens: Tensor | None) -> None:
    checks.tensors(logp=logp, cu_seqlens=cu_seqlens, advantages=advantages)
    checks.need(logp.dim() == 1, f"logp must be (T,), got {described(logp)}")
    precise = logp.dtype in DTYPES
    checks.need(precise, f"logp must be float32 or float64, got {described(logp)}: a ratio needs their precision")
    checks.need(cu_seqlens.dim() == 1, f"cu_seqlens must be (S + 1,), got {described(cu_seqlens)}")
    checks.beside("cu_seqlens", cu_seqlens, cu_seqlens.shape, logp.device)
    checks.beside("advantages", advantages, (cu_seqlens.shape[0] - 1,), logp.device)
    for name, tensor in of_tokens.items():
        if tensor is not None or name == "rollout_logp":
            checks.beside(name, tensor, logp.shape, logp.device)


@torch.library.custom_op(
    "spiral_kernels::policy_loss",
    mutates_args=(),
    schema="(Tensor logp, Tensor rollout_logp, Tensor advantages, Tensor cu_seqlens, Tensor? old_logp, "
    "Tensor? ref_logp, Tensor? token_weight, str loss, float lower, float upper, float dual, float tis_cap, "
    "float kl_coef, str kl, float token_low, float token_high, float sequence_low, float sequence_high, "
    "float off_policy, bool with_gradient) -> (Tensor loss, Tensor d_logp, Tensor statistics)",
)
def _forward(
    logp,
    rollout_logp,
    advantages,
    cu_seqlens,
    old_logp,
    ref_logp,
    token_weight,
    loss,
    lower,
    upper,
    dual,
    tis_cap,
    kl_coef,
    kl,
    token_low,
    token_high,
    sequence_low,
    sequence_high,
    off_policy,
    with_gradient,
):
    check_cu_seqlens("policy_loss", cu_seqlens, logp.shape[0])
    run = packed.policy_loss
    if choose_backend("policy_loss", logp.device, logp.dtype) == "triton":
        from spiral_kernels.policy_loss.triton import policy_loss as run
    return run(
        logp,
        rollout_logp,
        advantages,
        cu_seqlens,
        old_logp,
        ref_logp,
        token_weight,
        packed.Settings(loss, lower, upper, dual, tis_cap, kl_coef, kl),
        packed.Masks(token_low, token_high, sequence_low, sequence_high, off_policy),
        with_gradient,
    )


@_forward.register_fake
def _(logp, *arguments):
    with_gradient = arguments[-1]
    return logp.new_empty(()), logp.new_empty(logp.shape if with_gradient else 0), logp.new_empty(6)


def _setup_context(ctx, inputs, output):
    _, d_logp, statistics = output
    ctx.mark_non_differentiable(statistics)
    # What the backward scales stays differentiable, so that a second derivative finds its way here and is refused.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(d_logp)
    ctx.n_inputs = len(inputs)


def _autograd(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * ctx.n_inputs
    (d_logp,) = ctx.saved_tensors
    return first_only("policy_loss", grad_loss * d_logp), *([None] * (ctx.n_inputs - 1))


_forward.register_autograd(_autograd, setup_context=_setup_context)

register_backends(
    "policy_loss",
    {
        "triton": lambda device, dtype: triton_unavailable(device),
        "torch": lambda device, dtype: None,
        "reference": lambda device, dtype: None,
    },
)
