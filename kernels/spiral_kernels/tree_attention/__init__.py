"""Causal attention over a prefix tree: every row attends to the rows before it on its own path from the root."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spiral_kernels.dispatch import BackendError, choose_backend, flash_attn_unusable, register_backends
from spiral_kernels.linear_logprob import native_why_not, triton_why_not
from spiral_kernels.prefix_tree import PrefixTree
from spiral_kernels.tree_attention.plan import CASCADES, DTYPES, TreePlan
from spiral_kernels.tree_attention.reference import accumulation_dtype

__all__ = ["TreePlan", "tree_attention"]

# Each module has forward(q, k, v, plan, scale) -> (out, lse) and backward(d_out, q, k, v, out, lse, plan, scale) ->
# (dq, dk, dv), shapes as in reference.py, without autograd. Arguments have stride 1 in D and any other strides; results
# are fresh, of any strides and floating dtype. T = 0 never gets there. Two runs are bit-equal, and a row's result does
# not depend on finite rows that it does not see.
BACKENDS = {
    "native": "spiral_kernels.tree_attention.native",
    "triton": "spiral_kernels.tree_attention.triton_kernels",
    "torch": "spiral_kernels.tree_attention.query_blocks",
    "cascade_flash_attn": "spiral_kernels.tree_attention.cascade_flash_attn",
    "cascade": "spiral_kernels.tree_attention.cascade",
    "reference": "spiral_kernels.tree_attention.reference",
}

TRITON_MAX_D = 256


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree | TreePlan | Sequence, *, scale: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v, where query row i sees key row j if and only if j <= i < subtree_end[node of j].

    q (T, Hq, D), k and v (T, Hkv, D), Hkv divides Hq (query head h reads key head h // (Hq / Hkv)): float32, bfloat16
    or float64, one dtype and device, any strides. scale > 0, None = 1 / sqrt(D). Returns (T, Hq, D) of q's dtype.

    tree: a PrefixTree, its (start, end, parent, subtree_end), or a TreePlan of either, which checks the tree and forms
    what the kernels need on the host: make it once and pass it to every layer, and always inside torch.compile.

    The backward keeps q, k, v, the result and one number per row and head, nothing under no_grad. Softmax and sums in
    float32 (float64 for float64). Deterministic. The gradient has no gradient of its own.

    A row does not depend on rows that it does not see, whatever they hold: inf and nan of one trace stay with the rows
    that see them (and cost time: 16 times and more). Not so with the backends triton and both cascades, where a hidden
    key counts 0 times its value.

    The Triton kernels are made for D up to 128: up to 256 they work, but keep registers in memory.

    Raises ValueError on shapes, dtypes, devices or nodes that do not fit, BackendError if a forced backend cannot
    serve, or on CUDA D is above 256.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"tree_attention: {name} must be a tensor, got {type(x).__name__}")
    plan = tree if isinstance(tree, TreePlan) else TreePlan.of(tree, q.device)
    _check(q, k, v, plan)
    scale = _scale(scale, q.shape[-1])
    backend = choose_backend("tree_attention", q.device, q.dtype)
    if backend == "triton" and q.shape[-1] > TRITON_MAX_D:
        raise BackendError(
            f"tree_attention: backend 'triton' serves D up to {TRITON_MAX_D}, got D = {q.shape[-1]}; "
            "force_backend('reference', 'tree_attention') serves any"
        )
    if len(q) and ((backend == "triton" and not plan.tiles) or (backend in CASCADES and not plan.levels.tensors)):
        raise ValueError(f"tree_attention: the plan was made when backend {backend!r} would not serve; make it again")
    out, _ = torch.ops.spiral_kernels.tree_attention(q, k, v, plan.tensors, scale, backend)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan) -> None:
    def need(good: bool, message: str) -> None:
        if not good:
            raise ValueError(f"tree_attention: {message}")

    def shape(x: Tensor) -> str:
        return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"

    need(q.dim() == 3 and q.shape[2] > 0, f"q must be (T, Hq, D), D > 0, got {shape(q)}")
    need(k.dim() == 3 and k.shape == v.shape, f"k and v must both be (T, Hkv, D), got {shape(k)} and {shape(v)}")
    need(k.shape[0] == q.shape[0] and k.shape[2] == q.shape[2], f"q {shape(q)} and k {shape(k)} differ in T or D")
    heads = f"q has {q.shape[1]} heads, k and v {k.shape[1]}: the number of query heads must be a multiple"
    need(k.shape[1] > 0 and q.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, heads)
    need(q.dtype in DTYPES, f"q must be float32, bfloat16 or float64, got {shape(q)}")
    for name, x in (("k", k), ("v", v)):
        need(x.dtype == q.dtype, f"q {shape(q)} and {name} {shape(x)} differ in dtype; cast one")
        need(x.device == q.device, f"{name} is on {x.device}, q on {q.device}")
    rows = plan.visible_until
    need(rows.device == q.device, f"the plan is for {rows.device}, q on {q.device}; TreePlan.of(tree, q.device)")
    need(rows.shape[0] == q.shape[0], f"the tree has {rows.shape[0]} rows, q {q.shape[0]}")


def _scale(scale: float | None, size: int) -> float:
    if scale is None:
        return 1 / math.sqrt(size)
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):  # flash attention is wrong for others
        raise ValueError(f"tree_attention: scale must be a number > 0, got {scale!r}; a sign belongs into q")
    return float(scale)


@torch.library.custom_op(
    "spiral_kernels::tree_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] plan, float scale, str backend) -> (Tensor out, Tensor lse)",
)
def _forward(q, k, v, plan, scale, backend):
    if q.shape[0] == 0:
        return _empty_results(q)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = map(_unit_stride, (q, k, v))
        out, lse = _module(backend).forward(q, k, v, TreePlan.from_tensors(plan), scale)
        return out.to(q.dtype).contiguous(), lse.contiguous()


@_forward.register_fake
def _(q, k, v, plan, scale, backend):
    return _empty_results(q)


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op(
    "spiral_kernels::tree_attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] plan, float scale, "
    "str backend) -> (Tensor dq, Tensor dk, Tensor dv)",
)
def _backward(d_out, q, k, v, out, lse, plan, scale, backend):
    if q.shape[0] == 0:
        return tuple(x.new_empty(x.shape) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        d_out, q, k, v, out = map(_unit_stride, (d_out, q, k, v, out))
        gradients = _module(backend).backward(d_out, q, k, v, out, lse, TreePlan.from_tensors(plan), scale)
        return tuple(gradient.to(q.dtype).contiguous() for gradient in gradients)


@_backward.register_fake
def _(d_out, q, k, v, out, lse, plan, scale, backend):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, plan, ctx.scale, ctx.backend = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, *plan)


def _autograd(ctx, d_out, _):
    q, k, v, out, lse, *plan = ctx.saved_tensors
    gradients = torch.ops.spiral_kernels.tree_attention_backward(d_out, q, k, v, out, lse, plan, ctx.scale, ctx.backend)
    return *gradients, [None] * len(plan), None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _module(backend: str):
    return importlib.import_module(BACKENDS[backend])


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _torch_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else f"it runs on CPU only, the tensors are on {device}"


def _flash_attn_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it runs on CUDA only, the tensors are on {device}"
    return _cascade_why_not(device, dtype) or flash_attn_unusable()


def _cascade_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"it runs on CUDA and CPU, the tensors are on {device}"
    return None if dtype == torch.bfloat16 else f"flash attention on CUDA takes bfloat16, not {dtype}"


register_backends(
    "tree_attention",
    {
        "native": native_why_not,
        "triton": triton_why_not,
        "torch": _torch_why_not,
        "cascade_flash_attn": _flash_attn_why_not,
        "cascade": _cascade_why_not,
        "reference": lambda device, dtype: None,
    },
)
