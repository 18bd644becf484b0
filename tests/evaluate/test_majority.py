from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from spiral_fast.evaluate.majority import majority_at_k


def brute_force(answers, correct, k) -> Fraction:
    """Vote in every subset of k; a tie is worth the share of its answers that are correct."""
    score = {}
    for a in set(answers) - {None}:
        rights = [c for b, c in zip(answers, correct, strict=True) if a == b]
        score[a] = Fraction(sum(rights), len(rights))
    total, subsets = Fraction(0), list(combinations(answers, k))
    for subset in subsets:
        votes = Counter(a for a in subset if a is not None)
        tied = [a for a, n in votes.items() if n == max(votes.values())]
        total += sum(score[a] for a in tied) / len(tied) if tied else 0
    return total / len(subsets)


@pytest.mark.parametrize("seed", range(20))
def test_equals_voting_in_every_subset(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 11))
    names = [None, "a", "b", "c", "d"][: rng.integers(1, 6)]
    answers = [names[i] for i in rng.integers(0, len(names), n)]
    verdict = {name: bool(rng.integers(2)) for name in names}
    correct = [verdict[a] for a in answers]
    for k in range(1, n + 1):
        assert majority_at_k(answers, correct, k) == pytest.approx(float(brute_force(answers, correct, k)), abs=1e-12)


def test_ties_are_shared_and_silence_does_not_vote():
    assert majority_at_k(["a", "b"], [True, False], 2) == 0.5
    assert majority_at_k(["a", "b", "c"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert majority_at_k([None, None, None, "a"], [False, False, False, True], 4) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["a", "a", "b"], [True, True, False], 3) == 1.0


def test_an_answer_with_mixed_verdicts_counts_by_its_share():
    answers, correct = ["a", "a", "a", "b"], [True, True, False, False]
    assert majority_at_k(answers, correct, 4) == pytest.approx(2 / 3)
    assert majority_at_k(answers, correct, 2) == pytest.approx(float(brute_force(answers, correct, 2)))


def test_majority_at_1_is_pass_at_1():
    answers = ["a"] * 5 + ["b"] * 20 + [None] * 7
    assert majority_at_k(answers, [a == "a" for a in answers], 1) == pytest.approx(5 / 32)


def test_64_samples_agree_with_20000_votes():
    """k = 16; four standard errors of the simulation."""
    rng = np.random.default_rng(0)
    answers = rng.choice(["a", "b", "c", "d"], 64, p=[0.35, 0.35, 0.2, 0.1])
    correct = answers == "b"
    exact = majority_at_k(answers.tolist(), correct.tolist(), 16)
    codes = np.unique(answers, return_inverse=True)[1]
    order = rng.random((20000, 64)).argsort(1)[:, :16]
    votes = (codes[order][..., None] == np.arange(4)).sum(1)
    tied = votes == votes.max(1, keepdims=True)
    share = tied[:, 1] / tied.sum(1)
    assert abs(share.mean() - exact) < 4 * share.std() / np.sqrt(len(share))


def test_more_than_the_samples_is_refused():
    with pytest.raises(ValueError, match="majority@3 needs at least 3 samples, there are 2"):
        majority_at_k(["a", "b"], [True, False], 3)


def test_1100_samples_agree_with_integers():
    """C(1100, 530) is beyond float64."""
    n_a, n_b, n_c, silent, k = 455, 445, 2, 198, 530
    won = 0
    for a in range(n_a + 1):
        for c in range(n_c + 1):
            for b in range(max(0, k - a - c - silent), min(n_b, k - a - c) + 1):
                if b >= max(a, c):  # an answer that ties with b halves the win; c never does here
                    subsets = comb(n_a, a) * comb(n_b, b) * comb(n_c, c) * comb(silent, k - a - b - c)
                    won += subsets * (1 if b > a else Fraction(1, 2))
    answers = ["a"] * n_a + ["b"] * n_b + ["c"] * n_c + [None] * silent
    truth = float(Fraction(won) / comb(1100, k))
    assert 0.1 < truth < 0.45
    assert majority_at_k(answers, [a == "b" for a in answers], k) == pytest.approx(truth, rel=1e-11)


def test_all_correct_is_one():
    answers = ["a"] * 300 + ["b"] * 300
    assert all(0 <= 1 - majority_at_k(answers, [True] * 600, k) < 1e-12 for k in (1, 7, 64, 599, 600))


@pytest.mark.parametrize("k", [16, 64, 128, 256])
def test_256_samples_agree_with_4000_votes(k):
    """Two answers of like frequency, and many with one or two votes; five standard errors of the simulation."""
    rng = np.random.default_rng(k)
    codes = np.concatenate([np.repeat([0, 1], [62, 60]), rng.integers(2, 100, 134)])
    exact = majority_at_k([str(code) for code in codes], (codes == 1).tolist(), k)
    order = rng.random((4000, 256)).argsort(1)[:, :k]
    votes = np.stack([(codes[order] == code).sum(1) for code in range(100)], 1)
    tied = votes == votes.max(1, keepdims=True)
    share = tied[:, 1] / tied.sum(1)
    assert abs(share.mean() - exact) <= 5 * share.std() / np.sqrt(len(share)) + 1e-12
    assert (0.1 < exact < 0.5) == (k < 256)
