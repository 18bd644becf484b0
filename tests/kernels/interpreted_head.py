"""What the operations' own cases do not reach; run by test_triton_rows.py in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels.linear_logprob import triton_forward, triton_rows
from spiral_kernels.linear_logprob.head import Head
from spiral_kernels.linear_logprob.tiled import softmax
from spiral_kernels.linear_logprob.tiles import RowSums, Tile


@pytest.mark.parametrize("columns", [5, 127, 4096, 10_000])
def test_a_narrower_gradient_takes_the_front_half_of_each_row(columns):
    """As bfloat16 does on CUDA; float16 here, which the interpreter has."""
    torch.manual_seed(0)
    logits, targets, scale = torch.randn(3, columns), torch.tensor([0, columns - 1, 2]), torch.tensor([1.0, 0.5, 2.0])
    log_p = (logits * scale[:, None]).log_softmax(1)
    truth = scale[:, None] * (torch.nn.functional.one_hot(targets, columns) - log_p.exp())
    sums, true = RowSums.none_yet(scale, True), (logits.gather(1, targets[:, None])[:, 0] * scale)
    tile = Tile(logits, 0, targets, scale, None, None)
    found = triton_rows.sums_and_gradient(tile, sums, true, None, torch.float16)
    assert found.dtype == torch.float16 and found.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(found.float(), truth, rtol=2e-3, atol=1e-6)
    logp, _, _, entropy = softmax(sums, true)
    torch.testing.assert_close(logp, log_p.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, torch.special.entr(log_p.exp()).sum(1))


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_shares_of_the_vocabulary_merge_to_the_same_sums(monkeypatch, programs):
    """One share, several, and one a tile, the last of them ragged; some shares hold nothing finite."""
    monkeypatch.setattr(triton_forward, "HOPPER_PROCESSORS", 1)
    monkeypatch.setattr(triton_forward, "PROGRAMS", programs)
    torch.manual_seed(0)
    vocabulary = 64 * 4 + 7
    hidden, weight, bias = torch.randn(5, 24), torch.randn(vocabulary, 24), torch.randn(vocabulary)
    bias[:100] = -torch.inf
    targets, row_index = torch.tensor([vocabulary - 1, 120, 200]), torch.tensor([4, 0, 4])
    scale = torch.tensor([1.0, 0.7, 1.5])
    args = hidden, Head(weight, bias, None), targets, row_index, scale, True
    sums, true = triton_forward.row_sums(*args)
    assert all(torch.equal(a, b) for a, b in zip(sums, triton_forward.row_sums(*args)[0], strict=True))
    log_p = ((hidden[row_index].double() @ weight.double().t() + bias) * scale[:, None]).log_softmax(1)
    logp, _, _, entropy = softmax(sums, true)
    torch.testing.assert_close(logp.double(), log_p.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.special.entr(log_p.exp()).sum(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [151936, 151937])
def test_large_vocabularies(monkeypatch, vocabulary):
    """In large tiles: the interpreter's time goes by their number."""
    monkeypatch.setattr(triton_forward, "TILES", {torch.float32: (16, 8192, 16, 4, 1)})
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 20), torch.randn(vocabulary, 20)
    targets, scale = torch.tensor([vocabulary - 1, 0, 70_000]), torch.ones(3)
    log_p = (hidden.double() @ weight.double().t()).log_softmax(1)
    logp, _, _, entropy = softmax(
        *triton_forward.row_sums(hidden, Head(weight, None, None), targets, None, scale, True)
    )
    torch.testing.assert_close(logp.double(), log_p.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.special.entr(log_p.exp()).sum(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "tiles", "programs"), [(1, 1187, 1056), (16, 1187, 1056), (2000, 1187, 2000)])
def test_enough_programs_for_every_processor(rows, tiles, programs):
    share = triton_forward._share(rows, tiles, torch.device("meta"))
    shares = -(-tiles // share)
    assert programs / 2 < rows * shares <= programs and shares * share >= tiles
