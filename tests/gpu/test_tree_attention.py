"""tree_attention and PrefixTree on CUDA: the cases of tests/kernels/test_tree_attention.py and a large tree."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels import PrefixTree, TreePlan, available_backends, force_backend, tree_attention
from tests.gpu.on_cuda import DEVICE, backend_fixture, cases_of, skip_without_cuda
from tests.kernels import test_tree_attention as cases

pytestmark = pytest.mark.gpu

backend = backend_fixture(cases, "tree_attention")
globals().update(cases_of(cases))


@pytest.fixture(autouse=True)
def dtypes_of_cuda(monkeypatch):
    """The cases ask which dtypes a backend serves."""
    monkeypatch.setattr(cases, "available_backends", lambda name, _, dtype: available_backends(name, DEVICE, dtype))


def test_a_prefix_tree_moves():
    tree = PrefixTree.from_segments([[[1, 2], [3, 4, 5]], [[1, 2], [3, 6]], [[7], [8, 9]]])
    there = tree.to(DEVICE)
    assert all(x.is_cuda and torch.equal(x.cpu(), y) for x, y in zip(there, tree, strict=True))
    q, k, v = (torch.randn(tree.computed_tokens, 4, 32, device=DEVICE) for _ in range(3))
    assert torch.equal(tree_attention(q, k, v, there), tree_attention(q, k, v, TreePlan.of(tree, DEVICE)))


def test_a_large_tree_in_bfloat16():
    """One problem's shape: 8 traces share a prompt, then 16 quote four of them. No worse than torch's own bfloat16."""
    nodes = cases.tree_of([-1] + [0] * 8 + [-1] + [9] * 4, [256] + [300] * 8 + [1300] + [200] * 4)
    mask = cases.sees(nodes).to(DEVICE)
    qkv, d_out = cases.inputs(int(nodes[1][-1]), (32, 8), 128, torch.bfloat16)
    qkv, d_out = [x.detach().to(DEVICE).requires_grad_() for x in qkv], d_out.to(DEVICE)
    out = cases.plain(*qkv, mask)
    torchs = [out.detach(), *torch.autograd.grad(out, qkv, d_out)]
    true = cases.truth(qkv, d_out, mask)
    for backend, why_not in available_backends("tree_attention", DEVICE, torch.bfloat16).items():
        if why_not is None:
            force_backend(backend, "tree_attention")
            try:
                ours = cases.ours(qkv, d_out, TreePlan.of(nodes, DEVICE))
            finally:
                force_backend(None, "tree_attention")
            for mine, its, exact in zip(ours, torchs, true, strict=True):
                assert (mine.double() - exact).abs().max() <= (its.double() - exact).abs().max() + 1e-3, backend


skip_without_cuda()
