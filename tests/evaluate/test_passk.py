from fractions import Fraction
from itertools import combinations
from math import comb, prod

import pytest

from spiral_fast.evaluate.passk import pass_at_k


@pytest.mark.parametrize("n_samples", [1, 5, 8])
def test_equals_the_share_of_subsets_with_a_correct_trace(n_samples):
    for n_correct in range(n_samples + 1):
        correct = [i < n_correct for i in range(n_samples)]
        for k in range(1, n_samples + 1):
            subsets = list(combinations(correct, k))
            assert pass_at_k(n_correct, n_samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_large_k():
    assert pass_at_k(1, 64, 32) == pytest.approx(0.5)
    assert pass_at_k(1, 64, 64) == 1.0 and pass_at_k(0, 64, 64) == 0.0
    assert pass_at_k(3, 64, 1) == pytest.approx(3 / 64)


def test_more_than_the_samples_is_refused():
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples, there are 4"):
        pass_at_k(1, 4, 5)


def test_256_of_4096():
    """Against the product form of the same share, in fractions: absolutely to 1e-15."""
    for n, k in ((256, 256), (256, 128), (4096, 256)):
        for n_correct in (0, 1, 2, 17, n // 2, n - 1, n):
            none = prod((Fraction(max(0, n - n_correct - i), n - i) for i in range(k)), start=Fraction(1))
            assert pass_at_k(n_correct, n, k) == pytest.approx(float(1 - none), abs=1e-15)
    assert pass_at_k(1, 4096, 256) == 256 / 4096 and comb(4096, 256) > 10**400
