"""Policy-gradient losses straight from hidden states: the head's gradient is formed while its logits are there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.checks import Checks
from spiral_kernels.derivatives import first_only
from spiral_kernels.dispatch import choose_backend, register_backends
from spiral_kernels.linear_logprob import check_head, native_why_not, triton_why_not
from spiral_kernels.linear_logprob.head import head_of
from spiral_kernels.linear_logprob.tiles import check_values
from spiral_kernels.linear_policy_loss import chunks, reference
from spiral_kernels.policy_loss.losses import TOKEN_LOSSES, Settings, mask_bounds, settings_of

__all__ = ["LinearPolicyLoss", "linear_policy_loss"]


class LinearPolicyLoss(NamedTuple):
    """float32 (float64 for float64 inputs); only `loss` carries a gradient. A live row has a weight and a credit."""

    loss: Tensor
    logp: Tensor  # (R,) at the temperature; 0 for a row of weight 0, which is not computed
    entropy: Tensor  # (R,) nats, likewise
    ratio_mean: Tensor  # r over live rows; 1 if none is live
    ratio_max: Tensor
    clip_low: Tensor  # share of the live rows whose ratio lies below the lower bound that holds for them
    clip_high: Tensor  # ... above the upper bound: 1 + high, or dual_clip where the credit is negative
    kl: Tensor  # mean over the rows of non-zero weight; 0 without ref_logp


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    rollout_logp: Tensor,
    token_weight: Tensor,
    *,
    row_index: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl: str = "k3",
    loss: str = "importance_sampling",
    clip: tuple[float | None, float | None] | None = None,
    dual_clip: float | None = None,
    tis_cap: float | None = None,
    token_mask: tuple[float, float] | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy_coef: float = 0.0,
) -> LinearPolicyLoss:
    """sum over rows r of token_weight_r * (w_r * surrogate_r + kl_coef * KL_r - entropy_coef * entropy_r).

    Row r is the token targets[r] predicted from hidden[row_index[r]]: log pi = log softmax(hidden @ weight.T /
    temperature)[target]. Surrogates, w, its cap and mask, KL and their sources: see `policy_loss`, of which this takes
    the token-level losses importance_sampling, ppo_clip, cispo and reinforce. What looks at a whole sequence (gspo, its
    masks) goes through `linear_logprob` and `policy_loss`.

    hidden (N, H), weight (V, H), targets (R,), row_index (R,), bias (V,), soft_cap, temperature: as in
    `linear_logprob`. advantages, rollout_logp, token_weight (the reduction, see `token_weights`; 0 = the row does not
    count), old_logp and ref_logp: (R,) of any real dtype, without gradient. Where old_logp is None the proximal policy
    is the sampler.

    The gradient is formed during the forward, tile by tile, two GEMMs a tile, three with a weight that is trained;
    d_weight is neither computed nor allocated for a frozen one, nor anything under no_grad. The backward only scales.
    Memory beyond the results: a few tiles and the gradient of each row (R, H) once in the accumulation dtype; with an
    entropy bonus or a trained weight, and on CUDA, one chunk of logits (CHUNK_BYTES of the device); for bfloat16 also
    d_hidden and d_weight once in float32. A row of weight 0 is left out: its hidden state, its target's log-probs are
    never read (they may be NaN) and its gradient is exactly 0. A row of credit 0 is computed for KL, entropy and logp,
    and has no surrogate; leave such rows out of the call where nothing of that is wanted.

    Raises ValueError on shapes, dtypes, devices or settings that do not fit, IndexError on an index out of range (on
    CUDA a device assertion), BackendError if a forced backend cannot serve. Deterministic on CPU; on CUDA sums over
    repeated row_index follow torch.use_deterministic_algorithms. Differentiating the gradient raises
    RuntimeError.
    """
    checks = Checks("linear_policy_loss")
    settings = settings_of(
        checks,
        TOKEN_LOSSES,
        loss,
        clip,
        dual_clip,
        tis_cap,
        kl_coef,
        kl,
        has_old=old_logp is not None,
        has_ref=ref_logp is not None,
    )
    low, high = mask_bounds(checks, "token_mask", token_mask, has_old=old_logp is not None)
    entropy_coef = checks.number("entropy_coef", entropy_coef)
    scale = _check(
        checks,
        (hidden, weight, bias, soft_cap, targets, row_index, temperature),
        advantages=advantages,
        rollout_logp=rollout_logp,
        token_weight=token_weight,
        old_logp=old_logp,
        ref_logp=ref_logp,
    )
    of_rows = advantages, rollout_logp, token_weight, old_logp, ref_logp
    backend = choose_backend("linear_policy_loss", hidden.device, hidden.dtype)
    if backend == "reference":
        check_values("linear_policy_loss", hidden, weight, targets, row_index, scale)
        head = hidden, weight, bias, targets, row_index, temperature, soft_cap
        results = reference.linear_policy_loss(head, *of_rows, settings, (low, high), entropy_coef)
        total, logp, entropy, statistics = (x.to(scale.dtype) for x in results)
    else:
        training = torch.is_grad_enabled()
        total, _, _, logp, entropy, statistics = torch.ops.spiral_kernels.linear_policy_loss(
            hidden,
            weight,
            bias,
            targets,
            row_index,
            scale,
            *of_rows,
            *settings,
            low,
            high,
            soft_cap,
            entropy_coef,
            training and hidden.requires_grad,
            training and weight.requires_grad,
            backend,
        )
    return LinearPolicyLoss(total, logp, entropy, *statistics.unbind())


def _check(checks: Checks, of_head: tuple, **of_rows: Tensor | None) -> Tensor:
    """1 / temperature as (R,) of the accumulation dtype. Raises ValueError with one line."""
    scale = check_head(checks, *of_head)
    for name, tensor in of_rows.items():
        if tensor is not None or name not in ("old_logp", "ref_logp"):
            checks.beside(name, tensor, scale.shape, scale.device)
    return scale


@torch.library.custom_op(
    "spiral_kernels::linear_policy_loss",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_index, Tensor scale, "
    "Tensor advantages, Tensor rollout_logp, Tensor token_weight, Tensor? old_logp, Tensor? ref_logp, str loss, "
    "float lower, float upper, float dual, float tis_cap, float kl_coef, str kl, float token_low, float token_high, "
    "float? soft_cap, float entropy_coef, bool need_hidden, bool need_weight, str backend) -> "
    "(Tensor loss, Tensor d_hidden, Tensor d_weight, Tensor logp, Tensor entropy, Tensor statistics)",
)
def _forward(
    hidden,
    weight,
    bias,
    targets,
    row_index,
    scale,
    advantages,
    rollout_logp,
    token_weight,
    old_logp,
    ref_logp,
    loss,
    lower,
    upper,
    dual,
    tis_cap,
    kl_coef,
    kl,
    token_low,
    token_high,
    soft_cap,
    entropy_coef,
    need_hidden,
    need_weight,
    backend,
):
    with torch.autocast(hidden.device.type, enabled=False):
        return chunks.linear_policy_loss(
            backend,
            hidden,
            head_of(weight, bias, soft_cap),
            targets,
            row_index,
            scale,
            chunks.Rows(advantages, rollout_logp, token_weight, old_logp, ref_logp),
            Settings(loss, lower, upper, dual, tis_cap, kl_coef, kl),
            (token_low, token_high),
            entropy_coef,
            need_hidden,
            need_weight,
        )


@_forward.register_fake
def _(hidden, weight, bias, targets, row_index, scale, *arguments):
    need_hidden, need_weight, _ = arguments[-3:]
    return (
        scale.new_empty(()),
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        scale.new_empty(targets.shape),
        scale.new_empty(targets.shape),
        scale.new_empty(5),
    )


def _setup_context(ctx, inputs, output):
    _, d_hidden, d_weight, *others = output
    ctx.mark_non_differentiable(*others)
    # What the backward scales stays differentiable, so that a second derivative finds its way here and is refused.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(d_hidden, d_weight)
    ctx.n_inputs = len(inputs)


def _autograd(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * ctx.n_inputs
    gradients = (
        first_only("linear_policy_loss", d * grad_loss.to(d.dtype)) if need else None
        for d, need in zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    )
    return *gradients, *([None] * (ctx.n_inputs - 2))


_forward.register_autograd(_autograd, setup_context=_setup_context)

register_backends(
    "linear_policy_loss",
    {
        "native": native_why_not,
        "triton": triton_why_not,
        "torch": lambda device, dtype: None,
        "reference": lambda device, dtype: None,
    },
)
