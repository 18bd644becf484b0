"""spiral_kernels.tree_attention: every backend against float64, forward and gradient, on trees of every shape."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spiral_kernels import (
    BackendError,
    PrefixTree,
    TreePlan,
    available_backends,
    dispatch,
    force_backend,
    tree_attention,
)
from spiral_kernels.dispatch import flash_attn_unusable
from spiral_kernels.tree_attention import cascade, cascade_flash_attn, flash_cpu, levels, reference

BACKENDS = available_backends("tree_attention")
HEADS = ((4, 2), (3, 3), (6, 1))


@pytest.fixture(params=[pytest.param(b, marks=pytest.mark.skipif(bool(w), reason=str(w))) for b, w in BACKENDS.items()])
def backend(request):
    """Each backend in turn, forced."""
    force_backend(request.param, "tree_attention")
    yield request.param
    force_backend(None, "tree_attention")


def need_dtype(backend: str, dtype: torch.dtype) -> None:
    why_not = available_backends("tree_attention", "cpu", dtype)[backend]
    if why_not:
        pytest.skip(why_not)


def tree_of(parents: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """(start, end, parent, subtree_end) of depth-first nodes."""
    end = torch.tensor(lengths).cumsum(0)
    subtree_end = end.clone()
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            subtree_end[parents[node]] = max(subtree_end[parents[node]], subtree_end[node])
    return end - torch.tensor(lengths), end, torch.tensor(parents), subtree_end


TREES = {
    "one row": ([-1], [1]),
    "one chain": ([-1], [129]),
    "two levels": ([-1, 0, 0, 2, 2, 0], [40, 30, 17, 64, 1, 65]),
    "forest": ([-1, 0, 0, -1, -1, 4], [20, 3, 5, 30, 1, 128]),
    "chain of single rows": (list(range(-1, 139)), [1] * 140),
    "many short children": ([-1] + [0] * 60, [70] + [2] * 60),
    "branches at every row": ([-1, *(p for i in range(60) for p in (2 * i, 2 * i))], [1] * 121),
}
LENGTHS = {f"length {n}": ([-1, 0, 0], [n, n, 1]) for n in (1, 2, 127, 128, 129)}


def inputs(n_rows: int, heads=(4, 2), d: int = 16, dtype=torch.float64, seed: int = 0):
    """q, k, v that want gradients, and d_out."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(n_rows, h, d) for h in (heads[0], heads[1], heads[1], heads[0])]
    *qkv, d_out = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in qkv], d_out


def sees(nodes) -> torch.Tensor:
    """(T, T) which key each query sees, by walking from its node to the root."""
    start, end, parent, _ = (array.tolist() for array in nodes)
    result = torch.zeros(end[-1], end[-1], dtype=torch.bool)
    for node in range(len(start)):
        above = node
        while above >= 0:
            result[start[node] : end[node], start[above] : end[above]] = True
            above = parent[above]
    return result.tril()


def plain(q, k, v, mask, scale=None):
    """Attention in torch's own words; differentiable."""
    q, k, v = (x.movedim(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].movedim(0, 1)


def truth(qkv, d_out, mask, scale=None):
    """out, dq, dk, dv in float64, by autograd."""
    wide = [x.detach().double().requires_grad_() for x in qkv]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = plain(*wide, mask, scale)
    return [out.detach(), *torch.autograd.grad(out, wide, d_out.double())]


def ours(qkv, d_out, tree, scale=None):
    out = tree_attention(*qkv, tree, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, qkv, d_out)]


@pytest.mark.parametrize("name", [*TREES, *LENGTHS])
def test_float64(backend, name):
    need_dtype(backend, torch.float64)
    nodes = tree_of(*(TREES | LENGTHS)[name])
    qkv, d_out = inputs(int(nodes[1][-1]))
    for mine, true in zip(ours(qkv, d_out, nodes), truth(qkv, d_out, sees(nodes)), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", TREES)
def test_float32(backend, name, heads):
    nodes = tree_of(*TREES[name])
    qkv, d_out = inputs(int(nodes[1][-1]), heads, 64, torch.float32)
    for mine, true in zip(ours(qkv, d_out, nodes, 0.2), truth(qkv, d_out, sees(nodes), 0.2), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["one chain", "two levels", "many short children"])
def test_bfloat16_is_as_exact_as_torchs(backend, name):
    need_dtype(backend, torch.bfloat16)
    nodes = tree_of(*TREES[name])
    mask = sees(nodes)
    qkv, d_out = inputs(len(mask), (9, 3), 64, torch.bfloat16)
    out = plain(*qkv, mask)
    torchs = [out.detach(), *torch.autograd.grad(out, qkv, d_out)]
    for mine, its, true in zip(ours(qkv, d_out, nodes), torchs, truth(qkv, d_out, mask), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - true).abs().max() <= (its.double() - true).abs().max() + 1e-3


def test_bfloat16_results_are_rounded_to_nearest_even(backend):
    need_dtype(backend, torch.bfloat16)
    v = torch.tensor([[1.0, 1 + 2**-7, -1.0], [1 + 2**-7, 1 + 2**-6, -1 - 2**-7]], dtype=torch.bfloat16)[:, None]
    out = tree_attention(torch.zeros_like(v), torch.zeros_like(v), v, tree_of([-1], [2]))
    assert torch.equal(out[1], v.float().mean(0).bfloat16())  # the mean of neighbours lies half way


def test_large_scores(backend):
    """exp would overflow without the row's maximum taken out, and vanish with any other."""
    nodes = tree_of(*TREES["two levels"])
    qkv, d_out = inputs(int(nodes[1][-1]), dtype=torch.float32)
    for offset in (100.0, -100.0):
        moved = [qkv[0].detach().abs().requires_grad_(), (qkv[1].detach() * 0.1 + offset).requires_grad_(), qkv[2]]
        for mine, true in zip(ours(moved, d_out, nodes), truth(moved, d_out, sees(nodes)), strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=2e-3, atol=2e-3)


def test_scores_far_apart(backend):
    """Most lie hundreds below their row's maximum, where exp is 0 in float32."""
    nodes = tree_of(*TREES["two levels"])
    qkv, d_out = inputs(int(nodes[1][-1]), dtype=torch.float32)
    apart = [(x.detach() * factor).requires_grad_() for x, factor in zip(qkv, (20, 5, 1), strict=True)]
    for mine, true in zip(ours(apart, d_out, nodes), truth(apart, d_out, sees(nodes)), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-3, atol=1e-3)


def test_a_chain_is_causal_attention(backend):
    nodes = tree_of([-1], [200])
    qkv, d_out = inputs(200, dtype=torch.float32)
    q, k, v = (x.movedim(0, 1)[None] for x in qkv)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].movedim(0, 1)
    mine = tree_attention(*qkv, nodes)
    torch.testing.assert_close(mine, causal, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(mine, qkv, d_out), torch.autograd.grad(causal, qkv, d_out), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_every_trace_has_what_it_has_alone(backend):
    """Also a trace that is the prefix of another, duplicates, and a trace of one token."""
    traces = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3], [1, 2, 3, 4, 5], [7], [7, 7, 7]]
    tree = PrefixTree.from_segments([[trace] for trace in traces])
    assert tree.computed_tokens == 9
    (q, k, v), _ = inputs(9, dtype=torch.float32)
    out = tree_attention(q, k, v, tree)
    for rows in tree.trace_rows.split(tree.trace_offsets.diff().tolist()):
        alone = plain(q[rows], k[rows], v[rows], torch.ones(len(rows), len(rows), dtype=torch.bool).tril())
        torch.testing.assert_close(out[rows], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_perturbed_sibling_leaves_the_others_bit_equal(backend, dtype):
    need_dtype(backend, dtype)
    nodes = tree_of([-1, 0, 0, 2, 2, 0, -1], [40, 30, 17, 64, 3, 65, 20])
    (start, end, _, subtree_end), changed = nodes, 2
    qkv, d_out = inputs(int(end[-1]), dtype=dtype)
    inside = torch.zeros(int(end[-1]), dtype=torch.bool)
    inside[start[changed] : subtree_end[changed]] = True
    moved = [x.detach().clone().index_add_(0, inside.nonzero()[:, 0], x.detach()[inside]) for x in qkv]
    before, after = ours(qkv, d_out, nodes), ours([x.requires_grad_() for x in moved], d_out, nodes)
    outside = ~inside
    assert not torch.equal(before[0][inside], after[0][inside])
    assert torch.equal(before[0][outside], after[0][outside])
    assert torch.equal(before[1][outside], after[1][outside])  # dq
    siblings = outside & (torch.arange(len(outside)) >= end[0])
    for mine, its in zip(before[2:], after[2:], strict=True):  # the parent's dk, dv change: the sibling reads them
        assert torch.equal(mine[siblings], its[siblings])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["q", "k", "v", "d_out"])
def test_what_is_not_finite_stays_with_the_rows_that_see_it(backend, where, dtype):
    """inf, -inf and nan (of any bits) in a row: no other trace's result or gradient changes."""
    need_dtype(backend, dtype)
    if backend.startswith("cascade"):
        pytest.skip("a hidden key counts 0 times its value there")
    nodes = tree_of([-1, 0, 0, 2, 2, 0, -1], [40, 30, 17, 64, 3, 65, 20])
    mask = sees(nodes)
    qkv, d_out = inputs(len(mask), (4, 2), dtype=dtype)
    clean = ours(qkv, d_out, nodes)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-3}
    odd_nan = torch.tensor([0x7FC10001], dtype=torch.int32).view(torch.float32).item()
    for row, value in ((75, float("inf")), (90, float("-inf")), (90, float("nan")), (149, odd_nan), (233, odd_nan)):
        changed = {name: x.detach().clone() for name, x in zip(("q", "k", "v", "d_out"), (*qkv, d_out), strict=True)}
        changed[where][row, 1, 3] = value
        found = ours([changed[name].requires_grad_() for name in ("q", "k", "v")], changed["d_out"], nodes)
        queries = mask[:, row] if where in ("k", "v") else torch.arange(len(mask)) == row
        keys = mask[queries].any(0)  # read by a query that the value reaches
        for name, mine, expected in zip(("out", "dq", "dk", "dv"), found, clean, strict=True):
            reached = keys if name in ("dk", "dv") else queries
            torch.testing.assert_close(mine[~reached].float(), expected[~reached].float(), **tolerance)
            if value != value and not (name == "out" and where == "d_out") and not (name == "dv" and where == "v"):
                of_row = mine[row].isnan().any(-1)
                assert of_row.any(), f"{name} must be nan where {where} is"


@pytest.mark.parametrize("rows", [3, 16, 40])
def test_a_score_of_minus_infinity_is_a_weight_of_zero(backend, rows):
    """Strips and tiles that are not full must not add anything for the queries that they lack."""
    if backend.startswith("cascade"):
        pytest.skip("torch's flash attention gives nan there")
    nodes, key = tree_of([-1], [rows]), 1
    qkv, d_out = inputs(rows, (4, 2), 16, torch.float32)
    changed = [x.detach().clone() for x in qkv]
    changed[0].abs_()
    changed[1][key] = -torch.inf
    found = ours([x.requires_grad_() for x in changed], d_out, nodes)
    mask = sees(nodes)
    mask[key + 1 :, key] = False  # as if hidden, from all but its own row, which sees nothing else finite than row 0
    mask[key, key] = False
    finite = [changed[0], changed[1].detach().nan_to_num(neginf=0.0).requires_grad_(), changed[2]]
    out, *_, dv = truth(finite, d_out, mask)
    torch.testing.assert_close(found[0].double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[3].double(), dv, rtol=1e-5, atol=1e-5)


def test_permuted_siblings_have_the_same_gradient(backend):
    lengths = [31, 20, 7, 40]  # a root and its children
    nodes = tree_of([-1, 0, 0, 0], lengths)
    permuted = tree_of([-1, 0, 0, 0], [lengths[i] for i in (0, 3, 1, 2)])
    rows = torch.cat([torch.arange(nodes[0][i], nodes[1][i]) for i in (0, 3, 1, 2)])
    qkv, d_out = inputs(int(nodes[1][-1]), dtype=torch.float32)
    there = ours([x.detach()[rows].requires_grad_() for x in qkv], d_out[rows], permuted)
    for here, moved in zip(ours(qkv, d_out, nodes), there, strict=True):
        torch.testing.assert_close(here[rows], moved, rtol=1e-5, atol=1e-5)


@st.composite
def tries(draw):
    traces: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        shared = traces[draw(st.integers(0, len(traces) - 1))] if traces else []
        fresh = draw(st.lists(st.integers(0, 1), max_size=40))
        traces.append(shared[: draw(st.integers(0, len(shared)))] + fresh)
    return PrefixTree.from_segments([[trace] for trace in traces])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=tries(), heads=st.sampled_from(HEADS))
def test_random_tries(backend, tree, heads):
    dtype = (
        torch.float64 if available_backends("tree_attention", "cpu", torch.float64)[backend] is None else torch.float32
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    qkv, d_out = inputs(tree.computed_tokens, heads, 8, dtype)
    mask = sees(tree[2:6]) if tree.computed_tokens else torch.zeros(0, 0, dtype=torch.bool)
    for mine, true in zip(ours(qkv, d_out, tree), truth(qkv, d_out, mask), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance)


def test_no_rows(backend):
    qkv, d_out = inputs(0, dtype=torch.float32)
    empty = PrefixTree.from_segments([])
    out, *gradients = ours(qkv, d_out, empty)
    assert out.shape == (0, 4, 16) and [g.shape for g in gradients] == [x.shape for x in qkv]


def test_two_runs_are_bit_equal(backend):
    nodes = tree_of(*TREES["two levels"])
    qkv, d_out = inputs(int(nodes[1][-1]), dtype=torch.float32)
    for once, again in zip(ours(qkv, d_out, nodes), ours(qkv, d_out, nodes), strict=True):
        assert torch.equal(once, again)


def test_any_strides(backend):
    """As a transformers model passes them, (1, H, T, D), and with D not the innermost; a broadcast gradient too."""
    nodes = tree_of(*TREES["two levels"])
    qkv, _ = inputs(int(nodes[1][-1]), dtype=torch.float32)
    d_out = torch.ones(()).expand(qkv[0].shape)
    expected = ours(qkv, d_out, nodes)
    for order in ((1, 0, 2), (2, 1, 0)):
        strided = [x.detach().permute(order).contiguous().permute(order).requires_grad_() for x in qkv]
        assert not strided[0].is_contiguous()
        for mine, true in zip(ours(strided, d_out, nodes), expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-6, atol=1e-6)


def test_the_references_gradient():
    plan = TreePlan.of(tree_of([-1, 0, 0], [3, 2, 2]))
    qkv, _ = inputs(7, (4, 2), 3)
    force_backend("reference", "tree_attention")
    assert torch.autograd.gradcheck(lambda *x: tree_attention(*x, plan), qkv)
    force_backend(None, "tree_attention")
    assert torch.autograd.gradcheck(lambda *x: reference.forward(*x, plan, 0.5), qkv)


def exact(q, k, v, level, scale):
    """Scores (H, R, K) of a level in plain torch, k and v with a head per query head, and which pairs are in it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    run_q, run_k = (
        torch.bucketize(torch.arange(len(x)), cu[1:], right=True) for x, cu in ((q, level.cu_rows), (k, level.cu_keys))
    )
    inside = run_q[:, None] == run_k
    if level.causal:
        inside &= level.keys <= level.rows[:, None]
    return torch.einsum("rhd,khd->hrk", q, k).mul(scale).masked_fill(~inside, -torch.inf), k, v


def exact_forward(q, k, v, level, scale):
    scores, _, v = exact(q, k, v, level, scale)
    return torch.einsum("hrk,khd->rhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def exact_backward(d_out, q, k, v, out, lse, level, scale):
    groups = q.shape[1] // k.shape[1]
    scores, k, v = exact(q, k, v, level, scale)
    p = (scores - lse.T[..., None]).exp()
    d_scores = p * (torch.einsum("rhd,khd->hrk", d_out, v) - (d_out * out).sum(-1).T[..., None]) * scale
    dq, dk = torch.einsum("hrk,khd->rhd", d_scores, k), torch.einsum("hrk,rhd->khd", d_scores, q)
    dv = torch.einsum("hrk,rhd->khd", p, d_out)
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


@pytest.mark.parametrize("name", TREES)
def test_the_cascades_merge_and_backward_are_exact(name):
    """Its merge and its use of the merged log-sum-exp, with a plain float64 flash attention in CUDA's place."""
    nodes = tree_of(*TREES[name])
    plan = TreePlan.of(nodes)._replace(levels=levels.levels_of(*nodes, "cpu"))
    (q, k, v), d_out = inputs(int(nodes[1][-1]))
    flash = SimpleNamespace(forward=exact_forward, backward=exact_backward)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = cascade.forward(q, k, v, plan, 0.25, flash)
    gradients = cascade.backward(d_out, q, k, v, out, lse, plan, 0.25, flash)
    for mine, true in zip((out, *gradients), truth((q, k, v), d_out, sees(nodes)), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-11, atol=1e-12)


def test_the_cascades_calls_fit_torchs_cuda_operators():
    """Their shapes and argument order, by torch's own description of the operators: nothing is computed."""
    from spiral_kernels.tree_attention import flash_cuda

    nodes = tree_of(*TREES["two levels"])
    plan = TreePlan.of(nodes)._replace(levels=levels.levels_of(*nodes, "meta"))
    (q, k, v), d_out = inputs(int(nodes[1][-1]), dtype=torch.bfloat16)
    q, k, v, d_out = (x.detach().to("meta") for x in (q, k, v, d_out))
    out, lse = cascade.forward(q, k, v, plan, 0.25, flash_cuda)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    gradients = cascade.backward(d_out, q, k, v, q, lse, plan, 0.25, flash_cuda)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def flash_attn_of_2_8(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal
):
    """flash-attn's signature and the layout of its log-sum-exp, without a GPU."""
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max() and dropout_p == 0
    runs = SimpleNamespace(cu_rows=cu_seqlens_q, cu_keys=cu_seqlens_k, causal=causal)
    out, lse = flash_cpu.forward(q, k, v, runs, softmax_scale)
    return out, lse.T.contiguous(), None, None


def flash_attn_backward_of_2_8(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (window_size_left, window_size_right, softcap, alibi_slopes, dropout_p) == (-1, -1, 0.0, None, 0.0)
    assert deterministic is True and softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[1], q.shape[0])
    runs = SimpleNamespace(cu_rows=cu_seqlens_q, cu_keys=cu_seqlens_k, causal=causal)
    for mine, its in zip(
        (dq, dk, dv), flash_cpu.backward(dout, q, k, v, out, softmax_lse.T, runs, softmax_scale), strict=True
    ):
        mine.copy_(its)


def test_the_cascades_calls_of_flash_attn(monkeypatch):
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = flash_attn_of_2_8
    interface._flash_attn_varlen_backward = flash_attn_backward_of_2_8
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    for name in TREES:
        nodes = tree_of(*TREES[name])
        plan = TreePlan.of(nodes)._replace(levels=levels.levels_of(*nodes, "cpu"))
        (q, k, v), d_out = inputs(int(nodes[1][-1]))
        q, k, v = (x.detach() for x in (q, k, v))
        out, lse = cascade_flash_attn.forward(q, k, v, plan, 0.25)
        gradients = cascade_flash_attn.backward(d_out, q, k, v, out, lse, plan, 0.25)
        for mine, true in zip((out, *gradients), truth((q, k, v), d_out, sees(nodes), 0.25), strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-11)


def test_flash_attn_serves_where_it_loads(monkeypatch):
    def on_cuda(name, dtype=torch.bfloat16):
        flash_attn_unusable.cache_clear()
        return available_backends("tree_attention", "cuda", dtype)[name]

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(dispatch._INSTALLED, "flash_attn", False)
    assert on_cuda("cascade_flash_attn") == "flash-attn is not installed" and on_cuda("cascade") is None
    monkeypatch.setitem(dispatch._INSTALLED, "flash_attn", True)
    assert "flash-attn does not load" in on_cuda("cascade_flash_attn")
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = lambda: None
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    assert on_cuda("cascade_flash_attn") is None
    assert "bfloat16, not torch.float32" in on_cuda("cascade_flash_attn", torch.float32)
    assert "CUDA only" in available_backends("tree_attention")["cascade_flash_attn"]
    flash_attn_unusable.cache_clear()


def test_levels_cover_each_visible_pair_once():
    for parents, lengths in TREES.values():
        nodes = tree_of(parents, lengths)
        count = torch.zeros(int(nodes[1][-1]), int(nodes[1][-1]), dtype=torch.int64)
        for level in levels.levels_of(*nodes, "cpu").unpack():
            cu_rows, cu_keys = level.cu_rows.tolist(), level.cu_keys.tolist()
            assert max(np.diff(cu_rows)) == level.most_rows and max(np.diff(cu_keys)) == level.most_keys
            for i in range(len(cu_rows) - 1):
                rows, keys = level.rows[cu_rows[i] : cu_rows[i + 1]], level.keys[cu_keys[i] : cu_keys[i + 1]]
                pairs = torch.ones(len(rows), len(keys), dtype=torch.int64)
                count[rows[:, None], keys] += pairs.tril() if level.causal else pairs
        assert torch.equal(count, sees(nodes).long())


def test_opcheck(backend):
    plan = TreePlan.of(tree_of(*TREES["forest"]))
    qkv, d_out = inputs(len(plan.visible_until), dtype=torch.float32)
    torch.library.opcheck(torch.ops.spiral_kernels.tree_attention.default, (*qkv, plan.tensors, 0.25, backend))
    out, lse = torch.ops.spiral_kernels.tree_attention(*qkv, plan.tensors, 0.25, backend)
    arguments = (d_out, *(x.detach() for x in (*qkv, out, lse)), plan.tensors, 0.25, backend)
    torch.library.opcheck(torch.ops.spiral_kernels.tree_attention_backward.default, arguments)


def test_compiled(backend):
    nodes = tree_of(*TREES["forest"])
    plan = TreePlan.of(nodes)
    qkv, d_out = inputs(int(nodes[1][-1]), dtype=torch.float32)
    compiled = torch.compile(
        lambda q, k, v, plan: tree_attention(q, k, v, plan) * 2, fullgraph=True, backend="aot_eager"
    )
    out = compiled(*qkv, plan)
    expected, *gradients = ours(qkv, d_out, plan)
    assert torch.equal(out, expected * 2)
    for mine, true in zip(torch.autograd.grad(out, qkv, d_out), gradients, strict=True):
        assert torch.equal(mine, true * 2)
    torch.compiler.reset()


def test_no_grad_keeps_nothing(backend):
    nodes = tree_of(*TREES["forest"])
    qkv, _ = inputs(int(nodes[1][-1]), dtype=torch.float32)
    with torch.no_grad():
        assert tree_attention(*qkv, nodes).grad_fn is None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert not tree_attention(*(x.detach() for x in qkv), nodes).requires_grad and not saved
        tree_attention(*qkv, nodes)
    n_rows = len(qkv[0])
    assert saved and all(x.numel() <= qkv[0].numel() for x in saved), "nothing of the size rows x rows"
    assert n_rows**2 > qkv[0].numel()


def test_autocast_changes_nothing(backend):
    nodes = tree_of(*TREES["forest"])
    qkv, _ = inputs(int(nodes[1][-1]), dtype=torch.float32)
    expected = tree_attention(*qkv, nodes)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tree_attention(*qkv, nodes), expected)


def test_a_plan_serves_many_calls_and_any_form_of_tree():
    tree = PrefixTree.from_segments([[[1, 2, 3]], [[1, 2, 4]], [[5]]])
    qkv, _ = inputs(5, dtype=torch.float32)
    expected = tree_attention(*qkv, tree)
    as_arrays = [array.numpy().astype(np.int32) for array in tree[2:6]]
    plan = TreePlan.of(tree)
    for form in (plan, TreePlan.of(plan), as_arrays, [array.tolist() for array in as_arrays]):
        assert torch.equal(tree_attention(*qkv, form), expected)
    assert plan.visible_until.dtype == torch.int32 and plan.visible_until.tolist() == [4, 4, 3, 4, 5]
    assert all(array.dtype == torch.int64 for array in plan[:4])


def test_a_plan_of_another_backend_is_refused():
    tree = PrefixTree.from_segments([[[1, 2, 3]]])
    plan = TreePlan.of(tree)
    qkv, _ = inputs(3, dtype=torch.float32)
    force_backend("cascade", "tree_attention")
    try:
        with pytest.raises(ValueError, match="backend 'cascade' would not serve; make it again"):
            tree_attention(*qkv, plan)
    finally:
        force_backend(None, "tree_attention")


NODES = ([0, 2, 3], [2, 3, 5], [-1, 0, 0], [5, 3, 5])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(5, 4)}, r"q must be \(T, Hq, D\), D > 0, got \(5, 4\) float32 on cpu"),
        ({"v": torch.zeros(5, 2, 9)}, r"k and v must both be \(T, Hkv, D\)"),
        ({"k": torch.zeros(6, 2, 8), "v": torch.zeros(6, 2, 8)}, "differ in T or D"),
        ({"q": torch.zeros(5, 3, 8)}, "q has 3 heads, k and v 2: the number of query heads must be a multiple"),
        ({"q": torch.zeros(5, 4, 8).half()}, "q must be float32, bfloat16 or float64, got .* float16"),
        ({"k": torch.zeros(5, 2, 8).double()}, "differ in dtype; cast one"),
        ({"k": torch.zeros(5, 2, 8, device="meta")}, "k is on meta, q on cpu"),
        ({"tree": ([0], [4], [-1], [4])}, "the tree has 4 rows, q 5"),
        (
            {"tree": NODES[:3]},
            r"a tree is a PrefixTree, a TreePlan or \(start, end, parent, subtree_end\), got 3 items",
        ),
        ({"tree": None}, r"a tree is a PrefixTree, .*, got NoneType"),
        ({"q": np.zeros((5, 4, 8))}, "q must be a tensor, got ndarray"),
        ({"scale": 0.0}, "scale must be a number > 0, got 0.0"),
        ({"scale": -0.5}, "scale must be a number > 0, got -0.5"),
        ({"scale": float("nan")}, "scale must be a number > 0, got nan"),
        ({"scale": torch.ones(())}, r"scale must be a number > 0, got tensor\(1.\)"),
        ({"tree": ([0.0], [5], [-1], [5])}, r"start must be \(M,\) integers, M = 1, got \(1,\) float32"),
        ({"tree": ([0, 2], [5], [-1], [5])}, r"end must be \(M,\) integers, M = 2, got \(1,\) int64"),
        ({"tree": ([0, 1, 3], *NODES[1:])}, "nodes must cover the rows in order: node 1 starts at row 1, not at 2"),
        ({"tree": ([0, 2, 3], [2, 2, 5], *NODES[2:])}, "node 1 ends at row 2 but starts at 2; nodes are never empty"),
        ({"tree": (*NODES[:3], [5, 4, 5])}, "subtree_end of node 1 is 4, but its subtree ends at row 3"),
        ({"tree": (*NODES[:3], [3, 3, 5])}, "subtree_end of node 0 is 3, but its subtree ends at row 5"),
        ({"tree": (*NODES[:2], [-1, 0, 3], NODES[3])}, "node 2 has parent 3: nodes must be depth-first"),
    ],
)
def test_errors(changed, message):
    arguments = {"q": torch.zeros(5, 4, 8), "k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 8), "tree": NODES}
    tree_attention(**arguments)
    with pytest.raises(ValueError, match=f"^tree_attention: .*{message}") as error:
        tree_attention(**arguments | changed)
    assert "\n" not in str(error.value)


def test_a_plan_for_another_device_is_refused():
    plan = TreePlan.of(NODES)._replace(visible_until=torch.zeros(5, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="the plan is for meta, q on cpu"):
        tree_attention(torch.zeros(5, 4, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 8), plan)


def test_a_backend_that_cannot_serve_says_why():
    assert available_backends("tree_attention", "cuda")["torch"] == "it runs on CPU only, the tensors are on cuda"
    assert "bfloat16, not torch.float32" in available_backends("tree_attention", "cuda")["cascade"]
    force_backend("triton", "tree_attention")
    try:
        if available_backends("tree_attention")["triton"]:
            with pytest.raises(BackendError, match="backend 'triton' .* cannot serve"):
                tree_attention(torch.zeros(5, 4, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 8), NODES)
    finally:
        force_backend(None, "tree_attention")


def test_rows_are_32_bit():
    with pytest.raises(ValueError, match="row numbers are 32-bit"):
        TreePlan.of(([0], [2**31], [-1], [2**31]))


@pytest.mark.skipif(bool(BACKENDS["native"]), reason=str(BACKENDS["native"]))
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("instructions", ["base", "avx2", "avx512"])
def test_native_instruction_sets_and_threads(instructions, threads):
    from spiral_kernels import _native

    best, n_threads = _native.instruction_set(), torch.get_num_threads()
    nodes = tree_of(*TREES["two levels"])
    try:
        try:
            _native.use_instruction_set(instructions)
        except ValueError:
            pytest.skip(f"no {instructions} here")
        torch.set_num_threads(threads)
        force_backend("native", "tree_attention")
        for heads, d in (((9, 3), 64), ((4, 4), 20), ((2, 1), 3)):  # D that is no multiple of any vector
            qkv, d_out = inputs(int(nodes[1][-1]), heads, d, torch.float32)
            once = ours(qkv, d_out, nodes)
            for mine, true in zip(once, truth(qkv, d_out, sees(nodes)), strict=True):
                torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
            assert all(map(torch.equal, once, ours(qkv, d_out, nodes)))
    finally:
        force_backend(None, "tree_attention")
        torch.set_num_threads(n_threads)
        _native.use_instruction_set(best)


@pytest.mark.skipif(bool(BACKENDS["native"]), reason=str(BACKENDS["native"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["two levels", "branches at every row"])
def test_native_threads_change_no_more_than_the_order_of_sums_over_queries(name, dtype):
    nodes, n_threads = tree_of(*TREES[name]), torch.get_num_threads()
    qkv, d_out = inputs(int(nodes[1][-1]), (9, 3), 20, dtype)
    force_backend("native", "tree_attention")
    try:
        torch.set_num_threads(1)
        alone = ours(qkv, d_out, nodes)
        for threads in (2, 3, 9):  # 9: more than strips of the second tree
            torch.set_num_threads(threads)
            together, again = ours(qkv, d_out, nodes), ours(qkv, d_out, nodes)
            assert all(map(torch.equal, together, again))
            assert all(map(torch.equal, together[:2], alone[:2]))  # out, dq
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-3}
            for mine, its in zip(together[2:], alone[2:], strict=True):
                torch.testing.assert_close(mine, its, **tolerance)
    finally:
        force_backend(None, "tree_attention")
        torch.set_num_threads(n_threads)


@pytest.mark.skipif(bool(BACKENDS["native"]), reason=str(BACKENDS["native"]))
@pytest.mark.parametrize("d", [1, 8, 17, 300])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
def test_native_any_width(heads, d):
    nodes = tree_of(*TREES["two levels"])
    qkv, d_out = inputs(int(nodes[1][-1]), heads, d, torch.float32)
    force_backend("native", "tree_attention")
    try:
        for mine, true in zip(ours(qkv, d_out, nodes), truth(qkv, d_out, sees(nodes)), strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=2e-5)
    finally:
        force_backend(None, "tree_attention")


def test_offsets_are_64_bit(backend):
    """Rows more than 2^31 elements apart; memory that is never touched is never had."""
    need_dtype(backend, torch.bfloat16)
    nodes, far = tree_of([-1, 0], [2, 2]), 2**30 + 8
    qkv, d_out = inputs(4, (1, 1), 8, torch.bfloat16)
    apart = [torch.empty(3 * far + 8, dtype=x.dtype).as_strided(x.shape, (far, 8, 1)) for x in qkv]
    for x, values in zip(apart, qkv, strict=True):
        x.copy_(values.detach())
        x.requires_grad_()
    for mine, true in zip(ours(apart, d_out, nodes), ours(qkv, d_out, nodes), strict=True):
        assert torch.equal(mine, true)
