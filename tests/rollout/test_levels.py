"""Roll-outs of more than two levels and of several set sizes on the real engine with the shipped model."""

from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.config import ConfigError, load_config
from spiral_fast.levels import levels_of
from spiral_fast.rollout.fits import check_fits
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import draw_sets, roll_out
from spiral_fast.set_up import set_up
from tests.rollout.losing import LosingEngine
from tests.rollout.test_requests_lost import tokens

SIZES = "problems.train_size=8", "problems.eval_size=4", "threads=1"
FOUR_LEVELS = (
    "rollout.levels=[{n_sets: 8, set_size: [1, 2], n_aggregations: 1, max_new_tokens: 24}, "
    "{n_sets: 8, set_size: 2, n_aggregations: 1, max_new_tokens: 20}, "
    "{n_sets: 2, set_size: [1, 2], n_aggregations: 2, max_new_tokens: 22}]"
)


def configure(*overrides: str, name: str = "demo_three_levels"):
    return load_config(f"configs/{name}.yaml", [*SIZES, *overrides])


@pytest.fixture(scope="module")
def parts():
    return set_up(configure())


def rolled(parts, config, draws, **settings):
    drawn = [(draw, parts.problems.train[draw]) for draw in draws]
    return roll_out(make_engine(config, parts.loaded), parts.prompts, drawn, config, **settings)


def test_every_level_quotes_the_one_below(parts):
    config = configure()
    for result in rolled(parts, config, [0, 1]):
        population = result.search
        assert len(result.levels) == 2
        for number, (stage, level) in enumerate(zip(result.levels, levels_of(config), strict=True), start=1):
            assert stage.sets.shape == (level.n_sets, level.set_sizes[0])
            assert (stage.sets == draw_sets(result, config, number)).all()
            for k, (members, group) in enumerate(zip(stage.members(), stage.groups, strict=True)):
                prompt = parts.prompts.aggregation(result.problem, [population[i].tokens for i in members])
                assert [trace.key[1:] for trace in group] == [(number, k, j) for j in range(level.n_aggregations)]
                assert all(trace.prompt == prompt and len(trace.tokens) <= 24 for trace in group)
            population = stage.population()
        assert (np.bincount(result.sets.ravel()) == 2).all()  # balanced below the top
        assert [len(t.tokens) > 0 for t in result.traces()] == [True] * 24


def test_several_sizes_and_four_levels(parts):
    config = configure(FOUR_LEVELS)
    (result,) = rolled(parts, config, [3])
    sizes = [[len(members) for members in stage.members()] for stage in result.levels]
    assert sizes == [[1] * 8 + [2] * 8, [2] * 8, [1, 1, 2, 2]]
    assert [len(stage.population()) for stage in result.levels] == [16, 8, 8]
    assert result.higher[1].sets[:2].tolist() == [[i, -1] for i in result.higher[1].sets[:2, 0]]
    counts = np.bincount(result.sets[result.sets >= 0])
    assert counts.tolist() == [3] * 8


def test_one_level_is_the_two_stages_bit_for_bit(parts):
    two = configure(name="demo")
    shape = "rollout.levels=[{n_sets: 4, set_size: 4, n_aggregations: 4, max_new_tokens: 24}]"
    one = configure(shape)
    for a, b in zip(rolled(parts, two, [0, 1]), rolled(parts, one, [0, 1]), strict=True):
        assert tokens([a]) == tokens([b])
        assert [t.logp.tobytes() for t in a.traces()] == [t.logp.tobytes() for t in b.traces()]


def test_a_problem_goes_up_while_others_still_search(parts):
    done = []
    config = configure("rollout.max_running=8")
    rolled(parts, config, range(3), on_trace=lambda _, trace: done.append(trace.key))
    first, last = done[0].problem, done[-1].problem
    tops = [i for i, key in enumerate(done) if key.problem == first and key.level == 2]
    searched = [i for i, key in enumerate(done) if key.problem == last and key.level == 0]
    assert min(tops) < max(searched)


def test_a_problem_lost_at_the_top_is_drawn_again_whole(parts):
    config, lost = configure("rollout.max_running=5"), []

    def loses(_, pending):
        at_top = [p for p, t in seen if t.key.level == 2 and p in pending]
        if lost or not at_top:
            return set()
        lost.append(at_top[0])
        return {at_top[0]}

    seen, progress = [], []
    drawn = [(draw, parts.problems.train[draw]) for draw in (0, 1)]
    engine = LosingEngine(make_engine(config, parts.loaded), loses)
    found = roll_out(
        engine,
        parts.prompts,
        drawn,
        config,
        progress=lambda done, total: progress.append((done, total)),
        on_trace=lambda problem, trace: seen.append((problem.id, trace)),
    )
    assert lost and progress[-1] == (48, 48)
    assert tokens(found) == tokens(rolled(parts, config, [0, 1]))


def test_what_could_overflow_the_context_names_the_levels(parts):
    config = configure()
    worst = check_fits(config, parts.prompts, parts.problems.train, parts.loaded.max_context)
    with pytest.raises(ConfigError, match=r"rollout.levels: \[24, 24\] cannot be used: the longest sequence"):
        check_fits(config, parts.prompts, parts.problems.train, worst.longest - 1)
