"""Cases of test_tree_attention_triton.py that run in Triton's interpreter: the kernels against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spiral_kernels import BackendError, PrefixTree, TreePlan, force_backend, tree_attention
from spiral_kernels.tree_attention import reference, triton_kernels, triton_tiles
from tests.kernels.tree_nodes import nodes_of

# |error| / (largest true value, at least 0.1); bfloat16: the interpreter also cuts its last bit off instead of rounding
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def plan_of(nodes) -> TreePlan:
    return TreePlan.of(nodes)._replace(tiles=triton_tiles.plan_tiles(*nodes))


def inputs(plan: TreePlan, heads: tuple[int, int], d: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """d_out, q, k, v."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(plan.visible_until)
    shapes = [(rows, n, d) for n in (heads[0], *heads, heads[1])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(module, d_out, q, k, v, plan: TreePlan, scale: float) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    out, lse = module.forward(q, k, v, plan, scale)
    return [out, lse, *module.backward(d_out, q, k, v, out, lse, plan, scale)]


def check(plan: TreePlan, heads=(2, 1), d: int = 16, dtype=torch.float32, scale: float = 0.2) -> list[torch.Tensor]:
    given_ = inputs(plan, heads, d, dtype)
    found = results(triton_kernels, *given_, plan, scale)
    true = results(reference, *(x.double() for x in given_), plan, scale)
    for name, x, truth in zip(("out", "lse", "dq", "dk", "dv"), found, true, strict=True):
        assert x.dtype == (torch.float32 if name == "lse" else dtype) and x.shape == truth.shape
        error = float((x.double() - truth).abs().max() / truth.abs().max().clamp(min=0.1))
        assert error <= TOLERANCE[dtype], (name, error)
    return found


@pytest.mark.parametrize("length", (1, 2, 127, 128, 129))
def test_chains(length):
    check(plan_of(nodes_of([-1], [length])))


@pytest.mark.parametrize("order", ((127, 2, 129, 1, 128), (1, 128, 129, 2, 127)))
def test_siblings_of_awkward_lengths(order):
    """Below a root, and below the second of its children: 400 rows, four tiles of queries, the last one partial."""
    check(plan_of(nodes_of([-1, 0, 0, 2, 2, 0], [9, *order])))


def test_a_forest_of_small_trees():
    check(plan_of(nodes_of([p for i in range(0, 48, 3) for p in (-1, i, i)], [5, 3, 2] * 16)))


def test_a_trace_that_is_the_prefix_of_another():
    trace = torch.randint(0, 9, (140,), generator=torch.Generator().manual_seed(0)).tolist()
    tree = PrefixTree.from_segments([[trace[:n]] for n in (130, 140, 20)] + [[[*trace[:60], 9, 9]]])
    assert tree.computed_tokens == 142
    check(plan_of(tree[2:6]))


@pytest.mark.parametrize(
    ("heads", "d", "dtype"),
    [
        ((8, 2), 16, torch.float32),
        ((3, 3), 16, torch.float32),
        ((1, 1), 80, torch.float32),
        ((1, 1), 5, torch.float32),
        ((2, 1), 128, torch.float32),
        ((1, 1), 256, torch.float32),
        ((2, 1), 64, torch.float16),
        ((2, 1), 128, torch.bfloat16),
        ((1, 1), 256, torch.bfloat16),
    ],
)
def test_heads_sizes_and_dtypes(heads, d, dtype):
    check(plan_of(nodes_of([-1, 0, 0], [70, 40, 60])), heads, d, dtype)


def test_heads_too_large_are_refused():
    plan = plan_of(nodes_of([-1], [2]))
    force_backend("triton", "tree_attention")
    try:
        for d in (256, 257):
            _, q, k, v = inputs(plan, (1, 1), d)
            if d == 256:
                assert tree_attention(q, k, v, plan).shape == q.shape
            else:
                with pytest.raises(BackendError, match="serves D up to 256, got D = 257; force_backend"):
                    tree_attention(q, k, v, plan)
    finally:
        force_backend(None, "tree_attention")


def test_rows_times_heads_are_32_bit():
    plan = plan_of(nodes_of([-1], [2]))
    q = torch.empty(2, 1, 1).expand(2, 2**24, 1)
    k = torch.empty(2, 1, 1)
    with pytest.raises(BackendError, match="numbers rows x heads in 32 bits, got 2 x 16777216"):
        triton_kernels.backward(q, q, k, k, q, torch.empty(2, 1).expand(2, 2**24), plan, 0.1)


def test_split_tiles_are_the_sum_of_their_parts(monkeypatch):
    nodes = nodes_of([-1, 0, 0, 0], [130, 100, 90, 80])
    whole = plan_of(nodes)
    monkeypatch.setattr(triton_tiles, "LEAST_SPLIT", 2)
    monkeypatch.setattr(triton_tiles, "MOST_SHARES", 100)
    split = plan_of(nodes)
    assert not len(whole.tiles[4]) and split.tiles[4].tolist() == [4, 0, 0, 0, 3, 0, 0, 2, 0]
    found = check(split, (4, 2), 16)
    given_ = inputs(whole, (4, 2), 16)
    for x, y in zip(found, results(triton_kernels, *given_, whole, 0.2), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_large_scores():
    """Weights of 0 and 1, maxima that rise and fall by thousands from tile to tile."""
    plan = plan_of(nodes_of([-1, 0, 0], [150, 40, 70]))
    d_out, q, k, v = inputs(plan, (1, 1), 16)
    k = k * 300
    found = results(triton_kernels, d_out, q, k, v, plan, 1.0)
    true = results(reference, *(x.double() for x in (d_out, q, k, v)), plan, 1.0)
    torch.testing.assert_close(found[:2], true[:2], rtol=1e-5, atol=1e-3, check_dtype=False)
    assert all(x.isfinite().all() for x in found)


def test_two_runs_and_what_a_sibling_changes():
    """Bit-equal twice; rows that do not see node 2, nor are seen from it, do not change with it."""
    nodes = nodes_of([-1, 0, 0, 0], [60, 50, 45, 70])
    plan = plan_of(nodes)
    d_out, q, k, v = inputs(plan, (2, 1), 16)
    first = results(triton_kernels, d_out, q, k, v, plan, 0.2)
    assert all(map(torch.equal, first, results(triton_kernels, d_out, q, k, v, plan, 0.2)))
    here = slice(int(nodes[0][2]), int(nodes[1][2]))
    for x in (d_out, q, k, v):
        x[here] *= -50
    second = results(triton_kernels, d_out, q, k, v, plan, 0.2)
    siblings = torch.ones(len(q), dtype=torch.bool)
    siblings[here] = False
    below = siblings.clone()
    below[:60] = False
    for x, y, unchanged in zip(first, second, (siblings, siblings, siblings, below, below), strict=True):
        assert torch.equal(x[unchanged], y[unchanged])
        assert not torch.equal(x[here], y[here])


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_trees(data):
    lengths = data.draw(st.lists(st.sampled_from((1, 2, 3, 30, 63, 64, 65)), min_size=1, max_size=8))
    path, parents = [], []
    for node in range(len(lengths)):
        depth = data.draw(st.integers(0, len(path)))
        parents.append(path[depth - 1] if depth else -1)
        path = [*path[:depth], node]
    check(plan_of(nodes_of(parents, lengths)))
