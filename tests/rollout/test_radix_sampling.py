from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.rollout.radix.sampling import sample, uniforms

CHI2_999 = {9: 27.9, 15: 37.7, 49: 85.4, 59: 98.3}  # 99.9 % quantile of chi-square by degrees of freedom


def chi_square(counts, probabilities) -> float:
    expected = np.asarray(probabilities) * np.sum(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniforms_depend_on_seed_and_index_alone():
    seeds = np.array([5, 2**63 - 1, 5, 0], np.uint64)
    index = np.array([0, 7, 3, 0], np.uint64)
    together = uniforms(seeds, index)
    alone = [uniforms(seeds[i : i + 1], index[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4 and (together >= 0).all() and (together < 1).all()


@pytest.mark.parametrize("along", ["index", "seed"])
def test_uniforms_are_uniform(along):
    n = np.arange(20000, dtype=np.uint64)
    fixed = np.full(len(n), 12345, np.uint64)
    u = uniforms(fixed, n) if along == "index" else uniforms(n, fixed)
    assert chi_square(np.histogram(u, 50, (0, 1))[0], np.full(50, 1 / 50)) < CHI2_999[49]
    pairs = np.histogram2d(u[:-1], u[1:], 4, ((0, 1), (0, 1)))[0].ravel()  # neighbours are independent
    assert chi_square(pairs, np.full(16, 1 / 16)) < CHI2_999[15]


@pytest.mark.parametrize("vocabulary", [10, 60, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inverts_the_cumulative_distribution(vocabulary, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, vocabulary, generator=generator) * 3).to(dtype)
    temperature = torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    u[:2] = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens, logp = sample(logits, temperature, u)
    probability = (logits.double() / temperature[:, None]).softmax(-1)
    upper = probability.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    own = probability.gather(1, tokens[:, None])[:, 0]
    slack = 1e-12 if dtype == torch.float64 else 1e-6
    assert (upper - own <= u + slack).all() and (u <= upper + slack).all()
    np.testing.assert_allclose(logp.numpy(), own.log().float().numpy(), atol=2e-6)
    assert logp.dtype == torch.float32


@pytest.mark.parametrize("vocabulary", [10, 2000])
def test_impossible_tokens_are_never_drawn(vocabulary):
    logits = torch.full((500, vocabulary), -torch.inf)
    possible = torch.tensor([3, vocabulary - 2])
    logits[:, possible] = torch.tensor([0.0, 1.0])
    u = torch.cat([torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64), torch.linspace(0, 0.999, 498)])
    tokens, logp = sample(logits, torch.ones(500), u)
    assert set(tokens.tolist()) == set(possible.tolist()) and torch.isfinite(logp).all()


@pytest.mark.parametrize("vocabulary", [10, 1200])
def test_frequencies_match_the_softmax(vocabulary):
    logits = torch.zeros(vocabulary)
    logits[:10] = torch.linspace(-2, 2, 10) + (7 if vocabulary > 10 else 0)
    n = 20000
    u = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64))
    tokens, _ = sample(logits.expand(n, -1), torch.full((n,), 0.8), torch.from_numpy(u))
    probability = (logits.double() / 0.8).softmax(-1).numpy()
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    if vocabulary > 10:  # everything else as one more outcome
        probability, counts = (np.append(x[:9], x[9:].sum()) for x in (probability, counts))
    assert chi_square(counts, probability) < CHI2_999[9]
