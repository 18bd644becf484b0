from itertools import combinations

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
