"""`rollout.levels` from the config to a trained adapter: what is refused, weights, gates, a run of three levels."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow.parquet as parquet
import pytest
from safetensors.torch import load_file

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.credit import credit_of, level_weights
from spiral_fast.levels import levels_of, multipliers
from spiral_fast.record.trace_store import read_rollouts, write_traces
from spiral_fast.replay import replay
from spiral_fast.rollout.two_stage import draw_sets
from spiral_fast.trace import Aggregated, Problem, ProblemRollout, Trace, TraceKey
from spiral_fast.train import train
from tests.test_train import metrics, small, without_time


def load(*overrides: str) -> Config:
    return load_config("configs/demo_three_levels.yaml", list(overrides))


def levels(*shapes: tuple, **more) -> str:
    """Of (n_sets, set_size, n_aggregations)."""
    extra = "".join(f", {key}: {value}" for key, value in more.items())
    found = [f"{{n_sets: {k}, set_size: {n}, n_aggregations: {m}{extra}}}" for k, n, m in shapes]
    return f"rollout.levels=[{', '.join(found)}]"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([levels((4, 4, 4), (4, 4, 4))], r"set_size: \[4\] .*M of search is 0.040, below 0.1: up to 8 of the 16"),
        ([levels((4, 2, 2), (4, 7, 2))], r"set_size: \[7\] .*M of search is .* or in level 1"),
        ([levels((4, [1, 8], 2), (4, 2, 2))], "rollout.levels.n_sets: 4 .*level 1: each of the 8 traces of level 0"),
        ([levels((3, 4, 2), (4, 2, 2))], "n_sets: 3 .*level 1: each of the 8 .* is 12; use a multiple"),
        ([levels((2, 8, 2), (4, 2, 2))], "n_sets: 2 .*level 1: only 1 distinct sets of 8"),
        ([levels((4, 2, 2), (1, 2, 2))], "n_sets: 1 .*level 2: the top needs at least 2"),
        ([levels((4, 2, 2), (4, 2, 1))], "n_aggregations: 1 .*level 2: the top needs at least 2"),
        ([levels((4, 2, 2), (4, 8, 2))], "set_size: 8 .*level 2: at most 7 of the 8 traces of level 1; a set of all"),
        ([levels((4, 9, 2), (4, 2, 2))], "set_size: 9 .*level 1: at most 8 of the 8 traces of level 0"),
        ([levels((4, [2, 2], 2))], r"set_size: \[2, 2\] .*a size is there twice"),
        ([levels((4, 2, 2), max_new_tokens=9, target_length=9)], "target_length: 9 .*level 1: the gate never acts"),
        (["rollout.set_sampler=balanced"], "rollout.set_sampler: 'balanced' .*biases the credits below the top"),
        (["rollout.member_order=shared_first"], "rollout.member_order: 'shared_first'"),
        (["rollout.n_sets=5"], "rollout.n_sets: 5 .*rollout.levels says it"),
        (["rollout.aggregation_max_new_tokens=24"], "rollout.aggregation_max_new_tokens: 24"),
        (["credit.aggregation_target_length=9"], "credit.aggregation_target_length: 9"),
        (["credit.algorithm=search_only"], "credit.algorithm: 'search_only' .*only spiral"),
        (["rollout.n_search=1"], "rollout.n_search: 1"),
        (
            ["rollout.levels=[{n_sets: 4, set_size: 2}]"],
            "rollout.levels.n_aggregations: entry 1: missing; traces per set",
        ),
        ([levels((4, [], 2))], r"rollout.levels.set_size: entry 1: \[\] is not allowed"),
        (["rollout.n_search=200", levels((400, 100, 2), (4, 2, 2))], r"set_size: 100 .*more than 2\^63 sets"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused(overrides, why):
    with pytest.raises(ConfigError, match=why) as error:
        load(*overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [[(4, 2, 1), (4, 1, 2)], [(4, [2, 4], 4)], [(8, 2, 2), (8, 2, 2), (4, 2, 2)]])
def test_shapes_that_can(shape):
    config = load(levels(*shape))
    assert min(map(float, multipliers(8, levels_of(config)))) >= 0.1


def test_one_level_may_have_balanced_sets_that_share_first():
    one = levels((4, 4, 4))
    config = load(one, "rollout.set_sampler=balanced", "rollout.member_order=shared_first")
    assert levels_of(config)[0].sampler == "balanced"


def test_weights_of_the_levels():
    assert level_weights(load()) == [1.0, 1.0, 1.0]
    assert level_weights(load("credit.search_weight=3")) == [3.0, 3.0, 1.0]
    search, middle, top = map(float, multipliers(8, levels_of(load())))
    assert level_weights(load("credit.search_weight=unbiased")) == pytest.approx([top / search, top / middle, 1.0])


def rollout(config: Config, draw: int = 0, lengths: int = 5) -> ProblemRollout:
    """Of the config's shape, with random rewards."""
    rng = np.random.default_rng(draw)

    def trace(level, k, index):
        tokens = rng.integers(0, 9, lengths).tolist()
        key = TraceKey("p", level, k, index)
        logp = rng.random(lengths).astype(np.float32)
        return Trace(key, [level, k], tokens, logp, "stop", 0, "text", float(rng.integers(2)), "wrong", "4")

    search = [trace(0, -1, i) for i in range(config.rollout.n_search)]
    found = ProblemRollout(Problem("p", "q", "a"), draw, search, np.zeros((0, 0), np.int64), [])
    for number, level in enumerate(levels_of(config), start=1):
        sets = draw_sets(found, config, number)
        groups = [[trace(number, k, j) for j in range(level.n_aggregations)] for k in range(len(sets))]
        found.add_level(Aggregated(sets, groups))
    return found


def test_each_level_has_its_own_gate():
    shape = [(8, [1, 2], 1), (4, 2, 2)]
    config = load(levels(*shape, target_length=4, max_new_tokens=24), "credit.search_target_length=5")
    found = rollout(config)
    credit_of(config)(found)
    gated = [{t.key.level for t in found.traces() if t.gated}, {t.key.level for t in found.traces() if t.credit > 0}]
    assert gated == [{1, 2}, {0}]  # length 5 is above 4, not above 5


def test_stored_levels_come_back(tmp_path):
    config = load(levels((8, [1, 2], 1), (8, 2, 2), (2, [1, 2], 2)))
    written = [rollout(config, draw) for draw in range(2)]
    path = write_traces(tmp_path / "traces", 1, written)
    for before, after in zip(written, read_rollouts(path), strict=True):
        assert [level.members() for level in before.levels] == [level.members() for level in after.levels]
        for a, b in zip(before.levels, after.levels, strict=True):
            assert (a.sets == b.sets).all() and a.sets.dtype == b.sets.dtype
        for a, b in zip(before.traces(), after.traces(), strict=True):
            assert (a.key, a.prompt, a.tokens, a.reward) == (b.key, b.prompt, b.tokens, b.reward)
            assert a.logp.tobytes() == b.logp.tobytes()


def adapter(run, step: int = 2) -> dict:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(three(tmp_path_factory.mktemp("runs") / "whole"))


def three(run, *overrides: str) -> Config:
    return small(run, "record={save_every: 1, checkpoint_every: 1}", *overrides, config="demo_three_levels")


def test_two_steps_train_every_level(trained):
    for step in metrics(trained):
        assert step["credit/live_share_aggregation_2"] > 0 and step["reward/aggregation_2"] is not None
        assert step["entropy/search"] >= 0 and step["skipped"] is None and step["logp_gap/max"] < 1e-4
    rows = parquet.read_table(trained / "traces" / "step_000001.parquet").to_pylist()
    assert [sum(row["level"] == level for row in rows) for level in (0, 1, 2)] == [32, 32, 32]
    report = (trained / "report.html").read_text()
    assert "aggregation 2" in report and "level 2: aggregation 0 of set 0 (traces of level 1:" in report


def test_a_resumed_run_is_the_whole_one(trained, tmp_path):
    run = tmp_path / "run"
    train(three(run, "learner.steps=1"))
    train(three(run), resume=True)
    assert without_time(run) == without_time(trained)
    whole = adapter(trained)
    assert all((tensor == whole[name]).all() for name, tensor in adapter(run).items())


def test_a_replay_gives_the_same_adapter(trained, tmp_path):
    run = replay(three(tmp_path / "replayed"), trained)
    whole = adapter(trained)
    assert all((tensor == whole[name]).all() for name, tensor in adapter(run).items())
    with pytest.raises(ConfigError, match=r"has \[8, 4, 4, 2, 4, 2, 2\] .* asks for \[8, 8, 2, 1, 4, 2, 2\]"):
        replay(three(tmp_path / "other", levels((8, 2, 1), (4, 2, 2), max_new_tokens=24)), trained)


def test_levels_and_their_m_need_no_torch():
    code = "import sys; from spiral_fast.config import load_config as l; l('configs/demo_three_levels.yaml'); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
