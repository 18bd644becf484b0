"""Log-probs of chosen tokens under a language-model head, without the logits matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch

from spiral_kernels.checks import Checks, described
from spiral_kernels.derivatives import first_only
from spiral_kernels.dispatch import choose_backend, native_unavailable, register_backends, triton_unavailable
from spiral_kernels.linear_logprob import reference, tiled
from spiral_kernels.linear_logprob.backends import forward, row_backend
from spiral_kernels.linear_logprob.head import accumulation_dtype, head_of
from spiral_kernels.linear_logprob.tiles import check_values

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class LogProbs(NamedTuple):
    """Each (R,), float32 (float64 for float64 inputs). Only logp carries a gradient."""

    logp: torch.Tensor
    entropy: torch.Tensor | None
    lse: torch.Tensor


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
) -> LogProbs:
    """log softmax(z[r])[targets[r]] for each row r, z = soft_cap * tanh((hidden[row_index[r]] @ weight.T + bias) /
    soft_cap) / temperature; without soft_cap, (hidden @ weight.T + bias) / temperature.

    hidden (N, H) and weight (V, H): float32, bfloat16 or float64, one dtype and device. targets (R,) int64 in 0 .. V-1.
    row_index (R,) int64 in 0 .. N-1: the hidden row of each r, repeats allowed (a prefix's last token predicts one
    token per child); None = row r, R = N. temperature > 0, finite: a number or (R,). R = 0 is fine.

    bias (V,): of any floating dtype, without gradient; -inf takes a class out (with a soft_cap it is that class's logit
    of -soft_cap, as the formula says). soft_cap > 0: Gemma 2's final_logit_softcapping, arXiv 2408.00118 section 2.

    Returns logp, lse (log-sum-exp of z, nats) and, if asked for, the entropy (nats) of each row's distribution; lse and
    entropy carry no gradient. With a frozen weight d_hidden is formed during the forward, two GEMMs in all, and kept as
    (R, H) of the accumulation dtype for the backward to scale; with weight.requires_grad the backward recomputes the
    logits tile by tile for d_hidden and d_weight; under no_grad there is no gradient work. Memory and precision: see
    tiled.py.

    Raises ValueError on shapes, dtypes, devices or numbers that do not fit (into a tensor of temperatures it looks on
    CPU only), IndexError on an index out of range (on CUDA a device assertion), BackendError if a forced backend cannot
    serve, RuntimeError where the gradient is differentiated. Deterministic on CPU; on CUDA sums over repeated
    row_index follow torch.use_deterministic_algorithms.
    """
    checks = Checks("linear_logprob")
    scale = check_head(checks, hidden, weight, bias, soft_cap, targets, row_index, temperature)
    checks.need(isinstance(return_entropy, bool), f"return_entropy must be True or False, got {return_entropy!r}")
    backend = choose_backend("linear_logprob", hidden.device, hidden.dtype)
    if backend == "reference":
        check_values("linear_logprob", hidden, weight, targets, row_index, scale)
        logp, lse, entropy = reference.linear_logprob(hidden, weight, bias, targets, row_index, temperature, soft_cap)
        logp, lse, entropy = logp.to(scale.dtype), lse.detach().to(scale.dtype), entropy.detach().to(scale.dtype)
    else:
        with_gradient = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
        logp, origin, log_norm, entropy, _ = torch.ops.spiral_kernels.linear_logprob(
            hidden, weight, bias, targets, row_index, scale, soft_cap, return_entropy, with_gradient, backend
        )
        lse = origin + log_norm
    return LogProbs(logp, entropy if return_entropy else None, lse)


def check_head(checks: Checks, hidden, weight, bias, soft_cap, targets, row_index, temperature) -> torch.Tensor:
    """1 / temperature as (R,) of the accumulation dtype. Raises ValueError with one line."""
    need = checks.need
    checks.tensors(hidden=hidden, weight=weight, targets=targets)
    need(hidden.dim() == 2, f"hidden must be (N, H), got {described(hidden)}")
    need(weight.dim() == 2 and weight.shape[0] > 0, f"weight must be (V, H) with V > 0, got {described(weight)}")
    both = f"hidden {described(hidden)} and weight {described(weight)}"
    need(hidden.shape[1] == weight.shape[1], f"{both} differ in H")
    need(hidden.dtype in DTYPES, f"hidden must be float32, bfloat16 or float64, got {described(hidden)}")
    need(hidden.dtype == weight.dtype, f"{both} differ in dtype; cast one")
    need(weight.device == hidden.device, f"weight is on {weight.device}, hidden on {hidden.device}")
    need(targets.dim() == 1 and targets.dtype == torch.int64, f"targets must be (R,) int64, got {described(targets)}")
    if row_index is None:
        message = f"targets {described(targets)} must have one entry per row of {described(hidden)}, or pass row_index"
        need(targets.shape[0] == hidden.shape[0], message)
    else:
        checks.beside("row_index", row_index, targets.shape, hidden.device, torch.int64)
    need(targets.device == hidden.device, f"targets is on {targets.device}, hidden on {hidden.device}")
    if bias is not None:
        checks.beside("bias", bias, weight.shape[:1], hidden.device)
        need(bias.is_floating_point(), f"bias must be of a floating dtype, got {described(bias)}")
    if soft_cap is not None:
        checks.number("soft_cap", soft_cap, above=0)

    dtype = accumulation_dtype(hidden.dtype)
    if isinstance(temperature, torch.Tensor):
        checks.beside("temperature", temperature, targets.shape, hidden.device)
        return 1 / temperature.to(dtype)
    scale = 1 / checks.number("temperature", temperature, above=0)
    return torch.full(targets.shape, scale, dtype=torch.float64, device=hidden.device).to(dtype)


@torch.library.custom_op(
    "spiral_kernels::linear_logprob",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_index, Tensor scale, "
    "float? soft_cap, bool with_entropy, bool with_gradient, str backend) -> "
    "(Tensor logp, Tensor origin, Tensor log_norm, Tensor entropy, Tensor d_logp)",
)
def _forward(hidden, weight, bias, targets, row_index, scale, soft_cap, with_entropy, with_gradient, backend):
    check_values("linear_logprob", hidden, weight, targets, row_index, scale)
    with torch.autocast(hidden.device.type, enabled=False):
        of_rows = targets.contiguous(), row_index, scale.contiguous()
        return forward(backend, hidden, head_of(weight, bias, soft_cap), *of_rows, with_entropy, with_gradient)


@_forward.register_fake
def _(hidden, weight, bias, targets, row_index, scale, soft_cap, with_entropy, with_gradient, backend):
    return tiled.empty_results(hidden, targets, scale, with_entropy, with_gradient)


@torch.library.custom_op(
    "spiral_kernels::linear_logprob_backward",
    mutates_args=(),
    schema="(Tensor grad_logp, Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_index, "
    "Tensor scale, float? soft_cap, Tensor origin, Tensor log_norm, Tensor logp, bool need_hidden, bool need_weight, "
    "str backend) -> (Tensor d_hidden, Tensor d_weight)",
)
def _backward(grad_logp, hidden, weight, bias, targets, row_index, scale, soft_cap, *arguments):
    *sums, need_hidden, need_weight, backend = arguments
    with torch.autocast(hidden.device.type, enabled=False):
        of_rows = targets.contiguous(), row_index, scale.contiguous()
        head = head_of(weight, bias, soft_cap)
        rows = row_backend(backend)
        return tiled.backward(rows, grad_logp, hidden, head, *of_rows, *sums, need_hidden, need_weight)


@_backward.register_fake
def _(grad_logp, hidden, weight, *arguments):
    need_hidden, need_weight, _ = arguments[-3:]
    return hidden.new_empty(hidden.shape if need_hidden else 0), weight.new_empty(weight.shape if need_weight else 0)


def _setup_context(ctx, inputs, output):
    hidden, weight, bias, targets, row_index, scale, ctx.soft_cap, _, ctx.with_gradient, ctx.backend = inputs
    logp, origin, log_norm, entropy, d_logp = output
    ctx.mark_non_differentiable(origin, log_norm, entropy)
    # What the backward scales stays differentiable, so that a second derivative finds its way here and is refused.
    ctx.set_materialize_grads(False)
    if ctx.with_gradient:
        ctx.like, ctx.hidden_dtype = hidden.shape, hidden.dtype
        ctx.save_for_backward(d_logp, row_index)
    else:
        ctx.save_for_backward(hidden, weight, bias, targets, row_index, scale, origin, log_norm, logp)


def _autograd(ctx, grad_logp, *_):
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    d_hidden = d_weight = None
    if grad_logp is None:
        return (None,) * 10
    if ctx.with_gradient:
        d_logp, row_index = ctx.saved_tensors
        d_hidden = tiled.sum_by_hidden_row(grad_logp[:, None] * d_logp, ctx.like, ctx.hidden_dtype, row_index)
    else:
        hidden, weight, bias, targets, row_index, scale, *sums = ctx.saved_tensors
        of_rows = targets, row_index, scale, ctx.soft_cap
        d_hidden, d_weight = torch.ops.spiral_kernels.linear_logprob_backward(
            grad_logp, hidden, weight, bias, *of_rows, *sums, need_hidden, need_weight, ctx.backend
        )
    gradients = d_hidden if need_hidden else None, d_weight if need_weight else None
    return *(first_only("linear_logprob", gradient) for gradient in gradients), *[None] * 8


_forward.register_autograd(_autograd, setup_context=_setup_context)


def native_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPU only, the tensors are on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {dtype}"
    return native_unavailable()


def triton_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {dtype}"
    if device.type == "cpu" and dtype == torch.bfloat16 and triton_unavailable(device) is None:
        return "Triton's interpreter computes wrong bfloat16 values"
    return triton_unavailable(device)


register_backends(
    "linear_logprob",
    {
        "native": native_why_not,
        "triton": triton_why_not,
        "torch": lambda device, dtype: None,
        "reference": lambda device, dtype: None,
    },
)
