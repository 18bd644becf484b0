"""Several shapes of recursive self-aggregation in one evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.config import ConfigError, load_config
from spiral_fast.evaluate.rsa import rsa_sets
from tests.evaluate.max_game import SEARCH_ROLE, SILENT, MaxEngine
from tests.evaluate.test_run import PROBLEMS, guesses, make_config, run

SHAPES = [{"population": 8, "set_size": 3, "steps": 2}, {"population": 16, "set_size": 2, "steps": 3}]


def test_shapes_share_the_search_traces_and_sample_nothing_twice():
    engine = MaxEngine()
    result = run(make_config(rsa=SHAPES), engine)
    searches = [r for r in engine.requests if r.prompt[-1] == SEARCH_ROLE]
    assert len(searches) == len({r.key for r in searches}) == 4 * 16  # the larger population; 12 samples are asked for
    assert len(engine.requests) == 4 * (16 + 2 * 8 + 3 * 16)
    assert len({request.seed for request in engine.requests}) == len(engine.requests)
    assert [len(shape["rsa"]) for shape in result["rsa_shapes"]] == [3, 4]
    assert [len(shape["stages"]) for shape in result["rsa_shapes"]] == [2, 3]
    whole = sum(stage["tokens"]["generated"] for shape in result["rsa_shapes"] for stage in shape["stages"])
    assert result["tokens"]["generated"] == whole + result["stages"][0]["tokens"]["generated"]


def test_the_first_shape_is_what_it_is_alone():
    both, alone = run(make_config(rsa=SHAPES)), run(make_config(rsa=SHAPES[0]))
    for key in ("rsa", "pass_at_k", "majority_at_k", "samples", "distinct_answers"):
        assert both[key] == alone[key]
    assert both["intervals"] == alone["intervals"]
    assert both["rsa_shapes"][0] == alone["rsa_shapes"][0] and both["rsa"] == both["rsa_shapes"][0]["rsa"]
    assert both["stages"][1:] == alone["stages"][1:] == alone["rsa_shapes"][0]["stages"]


@pytest.mark.parametrize("place", [0, 1])
def test_every_step_of_every_shape_by_hand(place):
    result = run(make_config(rsa=SHAPES))
    shape = SHAPES[place]
    populations = [guesses(p, shape["population"]) for p in PROBLEMS]
    for step in range(shape["steps"] + 1):
        if step:
            for p, problem in enumerate(PROBLEMS):
                before = [-1 if g == SILENT else g for g in populations[p]]
                sets = rsa_sets(shape["population"], shape["set_size"], 5, problem.id, step, -1 - place)
                populations[p] = [max(before[i] for i in members) for members in sets]
        shares = [np.mean([g == int(q.answer) for g in some]) for q, some in zip(PROBLEMS, populations, strict=True)]
        assert result["rsa_shapes"][place]["rsa"][step] == pytest.approx(np.mean(shares))


def test_sets_of_shapes_are_drawn_apart():
    assert not np.array_equal(rsa_sets(8, 4, 0, "p", 1, -1), rsa_sets(8, 4, 0, "p", 1, -2))


def test_one_mapping_is_a_list_of_one_and_bad_shapes_are_named():
    demo = "configs/demo.yaml"
    assert [s.steps for s in load_config(demo).evaluate.rsa] == [5]
    assert load_config(demo, ["evaluate.rsa.population=16"]).evaluate.rsa[0].population == 16
    assert load_config(demo, ["evaluate.rsa.steps=0"]).evaluate.rsa_shapes == []
    for override, message in (
        (
            "evaluate.rsa=[{population: 8, set_size: 9}]",
            "evaluate.rsa.set_size: 9 cannot be used: above its population",
        ),
        (
            "evaluate.rsa=[{steps: 1}, {steps: 2}]",
            "evaluate.rsa: .8, 4. cannot be used: .* keep the one with more steps",
        ),
        (
            "evaluate.rsa=[{steps: 1}, {sets: 2}]",
            "evaluate.rsa.sets: entry 2: unknown key; did you mean evaluate.rsa.steps",
        ),
        ("evaluate.rsa=[{steps: x}]", "evaluate.rsa.steps: entry 1: 'x' is not allowed: .*integer"),
        ("evaluate.rsa=[]", "evaluate.rsa: .. is not allowed"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(demo, [override])
