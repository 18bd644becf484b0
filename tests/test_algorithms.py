"""Which shapes each algorithm can be run with; that the configs of all of them train what they say."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from spiral_fast.algorithms import ALGORITHMS
from spiral_fast.config import ConfigError, CreditConfig, load_config
from spiral_fast.train import train

SHAPE = ("n_search", "set_size", "n_sets", "n_aggregations")
DEMO = {name: "demo" if name == "spiral" else f"demo_{name}" for name in ALGORITHMS}


def load(algorithm: str, *overrides: str):
    return load_config(f"configs/{DEMO[algorithm]}.yaml", list(overrides))


def shaped(algorithm: str, *shape: int, extra: tuple[str, ...] = ()):
    sampler = "rollout.set_sampler=uniform"
    values = [f"rollout.{key}={value}" for key, value in zip(SHAPE, shape, strict=True)]
    return load(algorithm, sampler, *values, *extra)


def test_every_algorithm_of_the_config_is_described():
    assert set(get_args(CreditConfig.model_fields["algorithm"].annotation)) == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_demos_sample_the_same_number_of_tokens_at_most(algorithm):
    config = load(algorithm)
    assert config.credit.algorithm == algorithm
    assert config.rollout.n_search + config.rollout.n_sets * config.rollout.n_aggregations == 24
    assert config.rollout.search_max_new_tokens == config.rollout.aggregation_max_new_tokens == 24


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        ("spiral", (2, 1, 2, 2)),
        ("grpo", (2, 0, 0, 0)),
        ("aggregator_only", (4, 4, 1, 2)),
        ("aggregator_only", (1, 1, 1, 2)),
        ("aggregator_only", (8, 4, 1, 2)),
        ("search_only", (4, 3, 2, 1)),
        ("independent", (2, 2, 1, 2)),
        ("poly_epo", (8, 4, 70, 0)),
        ("poly_epo", (2, 1, 2, 0)),
    ],
)
def test_smallest_shapes(algorithm, shape):
    config = shaped(algorithm, *shape)
    assert tuple(getattr(config.rollout, key) for key in SHAPE) == shape


@pytest.mark.parametrize(
    ("algorithm", "shape", "key"),
    [
        ("aggregator_only", (4, 4, 1, 1), "n_aggregations"),
        ("aggregator_only", (4, 4, 2, 2), "n_sets"),  # there is only one set of all
        ("aggregator_only", (4, 5, 1, 2), "set_size"),
        ("aggregator_only", (4, 0, 1, 2), "set_size"),
        ("aggregator_only", (4, 2, 0, 2), "n_sets"),
        ("search_only", (4, 4, 2, 1), "set_size"),
        ("search_only", (4, 2, 1, 1), "n_sets"),
        ("search_only", (4, 2, 2, 0), "n_aggregations"),
        ("search_only", (1, 1, 2, 1), "n_search"),
        ("independent", (1, 1, 1, 2), "n_search"),
        ("independent", (4, 2, 2, 1), "n_aggregations"),
        ("independent", (4, 5, 1, 2), "set_size"),
        ("independent", (4, 2, 7, 2), "n_sets"),
        ("poly_epo", (4, 4, 2, 0), "set_size"),
        ("poly_epo", (4, 2, 1, 0), "n_sets"),
        ("poly_epo", (4, 2, 7, 0), "n_sets"),
        ("poly_epo", (4, 2, 2, 1), "n_aggregations"),
        ("poly_epo", (1, 1, 2, 0), "n_search"),
        ("grpo", (4, 2, 0, 0), "set_size"),
        ("grpo", (4, 0, 0, 2), "n_aggregations"),
        ("grpo", (1, 0, 0, 0), "n_search"),
    ],
)
def test_shapes_that_would_credit_nothing_are_refused(algorithm, shape, key):
    with pytest.raises(ConfigError, match=f": rollout.{key}: .* cannot be used: "):
        shaped(algorithm, *shape)


@pytest.mark.parametrize(
    ("override", "read_by"),
    [
        ("credit.search_weight=2", {"spiral", "independent"}),
        ("credit.search_target_length=20", {"spiral", "grpo", "search_only", "independent", "poly_epo"}),
        ("credit.aggregation_target_length=20", {"spiral", "aggregator_only", "independent"}),
        ("credit.diversity=some.function", {"poly_epo"}),
        ("rollout.set_sampler=balanced", {"spiral", "aggregator_only", "search_only", "independent", "poly_epo"}),
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_option_is_refused_where_it_is_not_read(algorithm, override, read_by):
    if algorithm in read_by:
        assert load(algorithm, override)
    else:
        key = override.partition("=")[0]
        with pytest.raises(ConfigError, match=f": {key}: .* cannot be used: {algorithm} "):
            load(algorithm, override)


@pytest.mark.parametrize("algorithm", ["grpo", "poly_epo"])
def test_an_order_of_members_that_no_prompt_shows_is_refused(algorithm):
    with pytest.raises(ConfigError, match=f": rollout.member_order: .* cannot be used: {algorithm} quotes no traces"):
        load(algorithm, "rollout.member_order=shared_first")


@pytest.mark.parametrize("algorithm", ["aggregator_only", "search_only", "independent", "poly_epo"])
def test_a_step_trains_the_levels_it_says(algorithm, tmp_path):
    overrides = ["learner.steps=1", "batch.live_problems=8", "problems.train_size=32", "problems.eval_size=2"]
    overrides += ["evaluate={samples: 4, pass_at: [1], majority_at: [], rsa: {steps: 1}, bootstrap: 10}", "threads=1"]
    run = train(load(algorithm, *overrides, f"run_dir={tmp_path / 'run'}"))
    step = json.loads((run / "metrics.jsonl").read_text())
    trained = {"search": bool(ALGORITHMS[algorithm].search), "aggregation": ALGORITHMS[algorithm].trains_aggregation}
    assert step["problems/live"] > 0 and step["skipped"] is None and step["grad/norm"] > 0
    for level, expected in trained.items():
        assert (step[f"grad/norm_{level}"] > 0) == expected
        assert (step.get(f"credit/live_share_{level}", 0) > 0) == expected
        assert (f"entropy/{level}" in step) == expected
    assert ("reward/aggregation" in step) == ALGORITHMS[algorithm].aggregates
    assert ("grad/cosine" in step) == ALGORITHMS[algorithm].trains_both
    assert (run / "report.html").stat().st_size > 0
