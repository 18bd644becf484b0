"""The two-stage rollout on the real engine with the shipped model."""

from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.path_attention import native_missing
from spiral_fast.rollout.fits import check_fits
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import draw_sets, roll_out
from spiral_fast.set_up import SetUp, set_up
from spiral_fast.trace import AGGREGATION, SEARCH


def configure(*overrides: str) -> Config:
    return load_config("configs/demo.yaml", ["problems.train_size=8", "problems.eval_size=4", "threads=1", *overrides])


@pytest.fixture(scope="module")
def parts() -> SetUp:
    return set_up(configure())


def rollouts(parts: SetUp, config: Config, draws: list[int]):
    engine = make_engine(config, parts.loaded)
    return roll_out(engine, parts.prompts, [(draw, parts.problems.train[draw]) for draw in draws], config), engine


def test_every_trace_has_its_place_and_its_prompt(parts):
    config = configure()
    found, engine = rollouts(parts, config, [0, 1, 2])
    rollout = config.rollout
    for draw, result in enumerate(found):
        assert result.draw == draw and result.problem is parts.problems.train[draw]
        assert [trace.key.index for trace in result.search] == list(range(rollout.n_search))
        assert result.sets.shape == (rollout.n_sets, rollout.set_size)
        assert all(trace.key.level == SEARCH and trace.key.set == -1 for trace in result.search)
        for k, group in enumerate(result.aggregation):
            prompt = parts.prompts.aggregation(result.problem, [result.search[i].tokens for i in result.sets[k]])
            assert [trace.key[1:] for trace in group] == [(AGGREGATION, k, j) for j in range(rollout.n_aggregations)]
            assert all(trace.prompt == prompt for trace in group)
        for trace in result.traces():
            assert len(trace.logp) == len(trace.tokens) > 0
            assert (trace.tokens[-1] in parts.loaded.eos_token_ids) == (trace.finish_reason == "stop")
    assert len({tuple(trace.tokens) for trace in found[0].search}) > 1  # siblings differ
    prompts = [trace.prompt for result in found for trace in result.traces()]
    assert engine.counts.prompt == sum(map(len, prompts))
    # Every distinct prefix of the step's prompts is computed once.
    distinct = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    assert engine.counts.computed == len(distinct)


def test_traces_do_not_depend_on_the_other_problems_of_the_round(parts):
    config = configure()
    together, _ = rollouts(parts, config, [0, 1, 2, 3])
    alone, _ = rollouts(parts, config, [2])
    assert [t.tokens for t in together[2].traces()] == [t.tokens for t in alone[0].traces()]
    assert (together[2].sets == alone[0].sets).all()


def test_another_draw_of_the_same_problem_gives_other_traces(parts):
    config = configure()
    engine = make_engine(config, parts.loaded)
    problem = parts.problems.train[0]
    first, second = roll_out(engine, parts.prompts, [(0, problem), (8, problem)], config)
    assert [t.tokens for t in first.search] != [t.tokens for t in second.search]


@pytest.mark.parametrize("sampler", ["uniform", "ordered", "balanced"])
def test_sets_follow_the_sampler_and_repeat_for_the_same_draw(parts, sampler):
    config = configure(f"rollout.set_sampler={sampler}")
    (result,), _ = rollouts(parts, config, [1])
    assert (draw_sets(result, config) == result.sets).all()
    if sampler == "balanced":
        assert (np.bincount(result.sets.ravel(), minlength=8) == 2).all()
    result.draw += 1
    assert (draw_sets(result, config) != result.sets).any()


def test_without_sets_there_is_no_aggregation(parts):
    overrides = ["problems.train_size=8", "problems.eval_size=4", "threads=1"]
    config = load_config("configs/demo_grpo.yaml", overrides)
    (result,), _ = rollouts(parts, config, [0])
    assert len(result.search) == 24 and result.aggregation == [] and len(result.sets) == 0


def test_progress_reaches_the_whole(parts):
    config, seen = configure(), []
    engine = make_engine(config, parts.loaded)
    roll_out(
        engine, parts.prompts, [(0, parts.problems.train[0])], config, lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (24, 24) and all(a < b for (a, _), (b, _) in zip(seen, seen[1:], strict=False))


def test_what_could_overflow_the_context_is_refused_by_name(parts):
    worst = check_fits(configure(), parts.prompts, parts.problems.train, parts.loaded.max_context)
    longest = worst.aggregation_prompt + 24
    assert worst.longest == longest == check_fits(configure(), parts.prompts, parts.problems.train, longest).longest
    with pytest.raises(
        ConfigError, match=rf"rollout.aggregation_max_new_tokens: 24 cannot be used.*\({longest} tokens\)"
    ):
        check_fits(configure(), parts.prompts, parts.problems.train, longest - 1)


def test_each_trace_is_handed_on_once_it_is_complete(parts):
    config, seen = configure("rollout.max_running=3"), []
    engine = make_engine(config, parts.loaded)
    drawn = [(draw, parts.problems.train[draw]) for draw in (0, 1)]
    found = roll_out(
        engine,
        parts.prompts,
        drawn,
        config,
        progress=lambda done, total: seen.append(done),
        on_trace=lambda problem, trace: seen.append((problem, trace)),
    )
    calls = [entry for entry in seen if isinstance(entry, tuple)]
    expected = [(result.problem, trace) for result in found for trace in result.traces()]
    assert sorted(id(trace) for _, trace in calls) == sorted(id(trace) for _, trace in expected)
    assert all(trace.key.problem == problem.id and trace.text for problem, trace in calls)
    assert sum(isinstance(entry, int) for entry in seen[: len(seen) // 2]) > 1


def test_sets_without_aggregation(parts):
    config = configure()
    settings = config.rollout.model_copy(update={"n_aggregations": 0})
    config = config.model_copy(update={"rollout": settings})  # the algorithm decides whether a config may ask for it
    seen = []
    engine = make_engine(config, parts.loaded)
    drawn = [(draw, parts.problems.train[draw]) for draw in (0, 1)]
    found = roll_out(engine, parts.prompts, drawn, config, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * settings.n_search, 2 * settings.n_search)
    for result in found:
        assert result.aggregation == [[] for _ in range(settings.n_sets)] and len(result.traces()) == settings.n_search
        assert (result.sets == draw_sets(result, config)).all() and len(result.sets) == settings.n_sets


@pytest.mark.parametrize("running", [5, 16])
def test_early_problems_aggregate_while_later_ones_search(parts, running):
    """Aggregation traces of the first problem are done, and others running, before the last one's search is."""
    config, done = configure(f"rollout.max_running={running}"), []
    engine = make_engine(config, parts.loaded)
    drawn = [(draw, parts.problems.train[draw]) for draw in range(4)]
    roll_out(engine, parts.prompts, drawn, config, on_trace=lambda _, trace: done.append(trace.key))
    first, last = (problem.id for _, problem in (drawn[0], drawn[-1]))
    aggregated = [i for i, key in enumerate(done) if key.problem == first and key.level == AGGREGATION]
    searched = [i for i, key in enumerate(done) if key.problem == last and key.level == SEARCH]
    assert min(aggregated) < min(searched) and max(aggregated) < max(searched)


@pytest.mark.skipif(native_missing() is not None, reason=str(native_missing()))
def test_a_small_cache_changes_no_trace(parts):
    """rollout.cache_tokens just above one request, some more, and plenty: the same traces to the last bit."""
    drawn, found = [(0, parts.problems.train[0])], {}
    for tokens in (142, 300, 65536):
        config = configure(f"rollout.cache_tokens={tokens}", "rollout.batch_invariant=true")
        engine = make_engine(config, parts.loaded)
        (rollout,) = roll_out(engine, parts.prompts, drawn, config)
        assert engine.counts.prompt == engine.counts.cached + engine.counts.computed
        assert engine._pool.held == engine._tree.size <= tokens
        found[tokens] = engine.counts.computed, [(t.tokens, t.logp.tolist()) for t in rollout.traces()]
    computed, traces = zip(*found.values(), strict=True)
    assert all(other == traces[-1] for other in traces)
    assert min(computed) == computed[-1]
