"""Log-probs of chosen tokens under a language-model head, without the logits matrix."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch

from spiral_kernels.dispatch import choose_backend, native_unavailable, register_backends
from spiral_kernels.linear_logprob import reference, tiled, torch_rows

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
    temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
) -> LogProbs:
    """log softmax(hidden[row_index[r]] @ weight.T / temperature)[targets[r]] for each row r.

    hidden (N, H) and weight (V, H): float32, bfloat16 or float64, one dtype and device. targets (R,) int64 in 0 .. V-1.
    row_index (R,) int64 in 0 .. N-1: the hidden row of each r, repeats allowed (a prefix's last token predicts one
    token per child); None = row r, R = N. temperature > 0: a number or (R,). R = 0 is fine.

    Returns logp, lse (log-sum-exp of logits / temperature, nats) and, if asked for, the entropy (nats) of each row's
    distribution; lse and entropy carry no gradient. The backward recomputes the logits tile by tile, gives d_hidden,
    and d_weight only if weight.requires_grad. Memory and precision: see tiled.py.

    Raises ValueError on shapes, dtypes or devices that do not fit, IndexError on an index out of range (on CUDA a
    device assertion), BackendError if a forced backend cannot serve. Deterministic on CPU; on CUDA sums over repeated
    row_index follow torch.use_deterministic_algorithms.
    """
    scale = check_head(hidden, weight, targets, row_index, temperature)
    backend = choose_backend("linear_logprob", hidden.device, hidden.dtype)
    if backend == "reference":
        logp, lse, entropy = reference.linear_logprob(hidden, weight, targets, row_index, temperature)
        logp, lse, entropy = logp.to(scale.dtype), lse.detach().to(scale.dtype), entropy.detach().to(scale.dtype)
    else:
        logp, origin, log_norm, entropy = torch.ops.spiral_kernels.linear_logprob(
            hidden, weight, targets, row_index, scale, return_entropy, backend
        )
        lse = origin + log_norm
    return LogProbs(logp, entropy if return_entropy else None, lse)


def check_head(hidden, weight, targets, row_index, temperature) -> torch.Tensor:
    """1 / temperature as (R,) of the accumulation dtype. Raises ValueError with one line."""

    def need(good: bool, message: str) -> None:
        if not good:
            raise ValueError(f"linear_logprob: {message}")

    def shape(tensor: torch.Tensor) -> str:
        return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

    need(hidden.dim() == 2, f"hidden must be (N, H), got {shape(hidden)}")
    need(weight.dim() == 2 and weight.shape[0] > 0, f"weight must be (V, H) with V > 0, got {shape(weight)}")
    need(hidden.shape[1] == weight.shape[1], f"hidden {shape(hidden)} and weight {shape(weight)} differ in H")
    need(hidden.dtype in DTYPES, f"hidden must be float32, bfloat16 or float64, got {shape(hidden)}")
    need(hidden.dtype == weight.dtype, f"hidden {shape(hidden)} and weight {shape(weight)} differ in dtype; cast one")
    need(targets.dim() == 1 and targets.dtype == torch.int64, f"targets must be (R,) int64, got {shape(targets)}")
    if row_index is None:
        message = f"targets {shape(targets)} must have one entry per row of hidden {shape(hidden)}, or pass row_index"
        need(targets.shape[0] == hidden.shape[0], message)
    else:
        fits = row_index.shape == targets.shape and row_index.dtype == torch.int64
        need(fits, f"row_index must be int64 of targets' shape {tuple(targets.shape)}, got {shape(row_index)}")
    for name, tensor in (("weight", weight), ("targets", targets), ("row_index", row_index)):
        if tensor is not None:
            need(tensor.device == hidden.device, f"{name} is on {tensor.device}, hidden on {hidden.device}")

    dtype = tiled.accumulation_dtype(hidden.dtype)
    if isinstance(temperature, torch.Tensor):
        need(temperature.shape == targets.shape, f"temperature must be a number or (R,), got {shape(temperature)}")
        need(not temperature.requires_grad, "temperature carries no gradient; detach it")
        return 1 / temperature.to(device=hidden.device, dtype=dtype)
    need(temperature > 0, f"temperature must be > 0, got {temperature}")
    return torch.full(targets.shape, 1 / temperature, dtype=dtype, device=hidden.device)


def row_backend(name: str) -> tiled.RowBackend:
    if name == "native":
        from spiral_kernels.linear_logprob import native

        return native
    if name == "triton":
        from spiral_kernels.linear_logprob import triton_rows

        return triton_rows
    return torch_rows


@torch.library.custom_op(
    "spiral_kernels::linear_logprob",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, Tensor? row_index, Tensor scale, bool with_entropy, "
    "str backend) -> (Tensor logp, Tensor origin, Tensor log_norm, Tensor entropy)",
)
def _forward(hidden, weight, targets, row_index, scale, with_entropy, backend):
    with torch.autocast(hidden.device.type, enabled=False):
        return tiled.forward(row_backend(backend), hidden, weight, targets, row_index, scale, with_entropy)


@_forward.register_fake
def _(hidden, weight, targets, row_index, scale, with_entropy, backend):
    n_rows = targets.shape[0]
    return *(scale.new_empty(n_rows) for _ in range(3)), scale.new_empty(n_rows if with_entropy else 0)


@torch.library.custom_op(
    "spiral_kernels::linear_logprob_backward",
    mutates_args=(),
    schema="(Tensor grad_logp, Tensor hidden, Tensor weight, Tensor targets, Tensor? row_index, Tensor scale, "
    "Tensor origin, Tensor log_norm, Tensor logp, bool need_hidden, bool need_weight, "
    "str backend) -> (Tensor d_hidden, Tensor d_weight)",
)
def _backward(
    grad_logp, hidden, weight, targets, row_index, scale, origin, log_norm, logp, need_hidden, need_weight, backend
):
    with torch.autocast(hidden.device.type, enabled=False):
        return tiled.backward(
            row_backend(backend),
            grad_logp,
            hidden,
            weight,
            targets,
            row_index,
            scale,
            origin,
            log_norm,
            logp,
            need_hidden,
            need_weight,
        )


@_backward.register_fake
def _(grad_logp, hidden, weight, targets, row_index, scale, origin, log_norm, logp, need_hidden, need_weight, backend):
    return hidden.new_empty(hidden.shape if need_hidden else 0), weight.new_empty(weight.shape if need_weight else 0)


def _setup_context(ctx, inputs, output):
    hidden, weight, targets, row_index, scale, _, ctx.backend = inputs
    logp, origin, log_norm, entropy = output
    ctx.mark_non_differentiable(origin, log_norm, entropy)
    ctx.save_for_backward(hidden, weight, targets, row_index, scale, origin, log_norm, logp)


def _autograd(ctx, grad_logp, *_):
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    d_hidden, d_weight = torch.ops.spiral_kernels.linear_logprob_backward(
        grad_logp, *ctx.saved_tensors, need_hidden, need_weight, ctx.backend
    )
    return d_hidden if need_hidden else None, d_weight if need_weight else None, None, None, None, None, None


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
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with CUDA builds of torch)"
    if os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu":
        return None if dtype == torch.float32 else "Triton's interpreter computes wrong bfloat16 values"
    return None if device.type == "cuda" else f"it runs on CUDA only, the tensors are on {device}"


register_backends(
    "linear_logprob",
    {
        "native": native_why_not,
        "triton": triton_why_not,
        "torch": lambda device, dtype: None,
        "reference": lambda device, dtype: None,
    },
)
