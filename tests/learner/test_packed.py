from __future__ import annotations

import pytest
import torch

from spiral_fast.learner.packed import DocumentAttention, pack


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [4, 4, 7, 1, 1, 4], [1, 2, 127, 128, 129]])
def test_attention_is_causal_inside_documents(lengths, kv_heads):
    generator = torch.Generator().manual_seed(0)
    n_tokens, heads, size = sum(lengths), 4, 6
    q, k, v, d_out = (
        torch.randn(1, n_tokens, h, size, generator=generator, dtype=torch.float64).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = DocumentAttention(lengths, "cpu").attend(0, *leaves, 0.3)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (document[:, None] == document) & torch.ones(n_tokens, n_tokens).tril().bool()
    copies = [x.detach().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(heads // x.shape[1], 1) for x in copies]
    scores = (wide[0] @ wide[1].transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ wide[2]).transpose(1, 2)
    assert out.shape == (1, n_tokens, heads, size)
    assert torch.allclose(out, expected, atol=1e-12, rtol=0)
    ours = torch.autograd.grad(out, leaves, d_out.transpose(1, 2))
    truth = torch.autograd.grad(expected, copies, d_out.transpose(1, 2))
    for a, b in zip(ours, truth, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=0)


def test_neighbours_of_equal_length_share_a_call():
    assert DocumentAttention([3, 3, 3, 5, 3], "cpu").runs == [(3, 3), (5, 1), (3, 1)]


def test_each_sampled_token_is_predicted_by_the_token_before_it():
    packed = pack([([1, 2, 3], [4, 5]), ([6], [7]), ([8], [9, 10, 11])])
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 6, 8, 9, 10]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2]]
    assert packed.targets.tolist() == [4, 5, 7, 9, 10, 11]
    assert packed.tokens[0, packed.row_index].tolist() == [3, 4, 6, 8, 9, 10]
    assert packed.counts == [2, 1, 3]
