import numpy as np

from spiral_fast.evaluate.bootstrap import bootstrap_interval


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = []
    for seed in range(300):
        low, high = bootstrap_interval(rng.random(60) < 0.3, 400, seed)
        hits.append(low <= 0.3 <= high)
    assert 0.89 < np.mean(hits) < 0.99


def test_interval_matches_the_normal_approximation():
    values = np.random.default_rng(1).normal(size=400)
    low, high = bootstrap_interval(values, 4000, 0)
    error = values.std() / np.sqrt(len(values))
    np.testing.assert_allclose([low, high], values.mean() + 1.96 * error * np.array([-1, 1]), atol=0.1 * error)


def test_same_seed_same_interval():
    values = np.arange(10.0)
    assert (
        bootstrap_interval(values, 100, 3) == bootstrap_interval(values, 100, 3) != bootstrap_interval(values, 100, 4)
    )


def test_equal_values_have_no_width():
    assert bootstrap_interval(np.full(5, 0.25), 50, 0) == [0.25, 0.25]
    assert bootstrap_interval(np.array([0.7]), 50, 0) == [0.7, 0.7]
