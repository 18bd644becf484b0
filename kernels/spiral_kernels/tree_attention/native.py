"""tree_attention in C++ (csrc/tree_attention.cpp): CPU, float32 and bfloat16, torch's number of threads.

Strips of 16 queries, those of all heads that read a key head at once, walk the keys that they see: their path, packed
where siblings' subtrees lie between. All arithmetic in float32. Memory beyond the results: k and v of one key head in
float32; the backward's gradients of them too, and for each further thread those of one path.

out and dq are bit-equal for any number of threads; dk and dv, sums over threads, for the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels import _native
from spiral_kernels.tree_attention.plan import TreePlan


def forward(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    _native.tree_attention_forward(q, k, v, plan.visible_until, scale, out, lse, torch.get_num_threads())
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: TreePlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    threads = torch.get_num_threads()
    _native.tree_attention_backward(d_out, q, k, v, out, lse, plan.visible_until, scale, *gradients, threads)
    return gradients
