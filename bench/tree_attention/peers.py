"""Attention over a tree in the ways trainers do it. Each prepares what it may prepare once per batch, masks and copies
of the inputs in its own layout, and gives a function () -> (out, inputs, d_out) to time."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.tree_attention.cases import Case
from spiral_kernels import TreePlan, available_backends, force_backend, tree_attention

Result = tuple[Tensor, tuple[Tensor, ...], Tensor]  # out, the inputs that want gradients, d_out of out's shape
Peer = Callable[[Case], Callable[[], Result]]


def attend(q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
    """torch's attention on (rows, heads, D)."""
    heads_first = (x.movedim(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, enable_gqa=True, **how)[0].movedim(0, 1)


def ours(backend: str, case: Case) -> Callable[[], Result]:
    def run() -> Result:
        force_backend(backend, "tree_attention")
        try:
            return tree_attention(case.q, case.k, case.v, plan), (case.q, case.k, case.v), case.d_out
        finally:
            force_backend(None, "tree_attention")

    force_backend(backend, "tree_attention")
    try:
        plan = TreePlan.of(case.tree)
    finally:
        force_backend(None, "tree_attention")
    return run


def dense_mask(case: Case) -> Callable[[], Result]:
    mask = torch.zeros(case.sees.shape, dtype=case.q.dtype).masked_fill_(~case.sees, float("-inf"))
    return lambda: (attend(case.q, case.k, case.v, attn_mask=mask), (case.q, case.k, case.v), case.d_out)


def flex(case: Case) -> Callable[[], Result]:
    """Compiled, with a block mask; its backward does not exist on CPU."""
    until, n_rows = case.plan.visible_until, len(case.q)

    def visible(b, h, q, k):
        return (k <= q) & (q < until[k])

    blocks = create_block_mask(visible, None, None, n_rows, n_rows, device="cpu")
    q, k, v = (x.detach().movedim(0, 1)[None] for x in (case.q, case.k, case.v))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: (compiled(q, k, v, block_mask=blocks, enable_gqa=True)[0].movedim(0, 1), (), case.d_out)


def grouped(case: Case) -> Callable[[], Result]:
    """As PrefixGrouper: the queries of each node on the keys of its path, put together."""
    start, end, parent = (array.tolist() for array in case.tree[2:5])
    paths: list[Tensor] = []
    for node, above in enumerate(parent):
        own = torch.arange(start[node], end[node])
        paths.append(torch.cat([paths[above], own]) if above >= 0 else own)
    lengths = [b - a for a, b in zip(start, end, strict=True)]
    masks = [torch.ones(n, len(p), dtype=torch.bool).tril(len(p) - n) for n, p in zip(lengths, paths, strict=True)]

    def run() -> Result:
        q, k, v = case.q, case.k, case.v
        parts = [
            attend(q[a:b], k[path], v[path], attn_mask=mask)
            for a, b, path, mask in zip(start, end, paths, masks, strict=True)
        ]
        return torch.cat(parts), (q, k, v), case.d_out

    return run


def flat(case: Case) -> Callable[[], Result]:
    """Every trace alone, with its own copy of what it shares."""
    rows = case.tree.trace_rows
    q, k, v = (x.detach()[rows].requires_grad_() for x in (case.q, case.k, case.v))
    first = torch.full((len(case.q),), len(rows)).scatter_reduce(0, rows, torch.arange(len(rows)), "amin")
    d_out = torch.zeros_like(q)
    d_out[first] = case.d_out  # each row of the tree once
    lengths = case.tree.trace_offsets.diff().tolist()

    def run() -> Result:
        traces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*trace, is_causal=True) for trace in traces]), (q, k, v), d_out

    return run


def peers() -> dict[str, Peer]:
    able = available_backends("tree_attention")
    found = {f"tree_attention, {b}": functools.partial(ours, b) for b in able if able[b] is None and b != "reference"}
    return found | {
        "SDPA, dense mask": dense_mask,
        "FlexAttention, compiled (forward)": flex,
        "node by node, as PrefixGrouper": grouped,
        "trace by trace, SDPA causal": flat,
    }


def in_tree(case: Case, values: Tensor, *, summed: bool) -> Tensor:
    """Values of `flat`'s rows in the tree's rows: gradients are summed, of results the last is taken."""
    if len(values) == len(case.q):
        return values
    rows = case.tree.trace_rows
    zeros = values.new_zeros(len(case.q), *values.shape[1:], dtype=torch.float32)
    return zeros.index_add_(0, rows, values.float()) if summed else zeros.index_copy_(0, rows, values.float())
