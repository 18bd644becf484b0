"""Cases of policy_loss that only the Triton kernel has: run in its interpreter by test_policy_loss_triton.py."""

from __future__ import annotations

import pytest
import torch

from spiral_kernels import force_backend
from spiral_kernels.policy_loss import triton as kernels
from tests.kernels.test_policy_loss import SETTINGS, Batch, check


@pytest.fixture(autouse=True)
def triton():
    force_backend("triton", "policy_loss")
    yield
    force_backend(None, "policy_loss")


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_sequences_of_many_blocks(case, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 4)
    monkeypatch.setattr(kernels, "ROWS", 2)
    check(Batch([7, 0, 1, 12, 4, 8]), case[0], **case[1])


@pytest.mark.parametrize("n_sequences", [1, 4, 5])
def test_numbers_of_sequences(n_sequences, monkeypatch):
    monkeypatch.setattr(kernels, "ROWS", 4)
    batch = Batch([2] * n_sequences)
    found, d_found = batch.run("ppo_clip", clip=(0.2, 0.2), kl_coef=0.1)
    force_backend("reference", "policy_loss")
    expected, d_expected = batch.run("ppo_clip", clip=(0.2, 0.2), kl_coef=0.1)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_found, d_expected, rtol=1e-12, atol=1e-12)


def test_a_mask_is_a_weight():
    batch = Batch([5, 8], dtype=torch.float32)
    batch.weight = batch.weight > 0.5
    found = batch.run("reinforce")
    batch.weight = batch.weight.float()
    assert found[0] == batch.run("reinforce")[0] and torch.equal(found[1], batch.run("reinforce")[1])


def test_strided_inputs():
    batch = Batch([5, 8])
    clean = batch.run("ppo_clip", clip=(0.1, 0.1), old=True)
    for name in ("logp", "rollout", "old", "weight", "credit", "cu_seqlens"):
        setattr(batch, name, torch.stack([getattr(batch, name)] * 2, 1)[:, 0])
    found = batch.run("ppo_clip", clip=(0.1, 0.1), old=True)
    assert found[0] == clean[0] and torch.equal(found[1], clean[1])
