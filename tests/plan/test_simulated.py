from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.plan.lengths import parse_lengths, usual_lengths
from spiral_fast.plan.plan import longest_sequence
from spiral_fast.plan.simulated import Simulated, Workload, liveness

CONFIGS = Path(__file__).parents[2] / "configs"
NO_TARGETS = "credit.search_target_length=null", "credit.aggregation_target_length=null"

THREE_LEVELS = (
    *NO_TARGETS,
    "rollout.levels=[{n_sets: 8, set_size: [1, 2], n_aggregations: 1, max_new_tokens: 40}, "
    "{n_sets: 4, set_size: 2, n_aggregations: 3, max_new_tokens: 25}]",
)


def config_of(*overrides: str, name: str = "paper_qwen3_4b") -> Config:
    return load_config(CONFIGS / f"{name}.yaml", list(overrides))


def simulated(*overrides: str, lengths: str = "uniform:20:60", solve_rate: float | None = None) -> Simulated:
    return Simulated(config_of(*overrides), Workload(parse_lengths(lengths), 64, solve_rate))


def test_rollouts_are_the_outlines_with_tokens():
    of = simulated("credit.search_target_length=40", "credit.aggregation_target_length=40")
    draws = [3, 0, 5]
    for draw, rollout in zip(draws, of.rollouts(draws), strict=True):
        outline = of.outline(draw)
        np.testing.assert_array_equal(outline.sets, rollout.sets)
        assert [t.credit for t in outline.traces()] == [t.credit for t in rollout.traces()]
        assert [t.gated for t in outline.traces()] == [t.gated for t in rollout.traces()]
        assert [len(t.tokens) for t in outline.traces()] == [len(t.tokens) for t in rollout.traces()]
        assert len(rollout.search) == 8 and [len(group) for group in rollout.aggregation] == [4] * 4
        assert {len(trace.prompt) for trace in rollout.search} == {64}
        for group, members in zip(rollout.aggregation, rollout.sets, strict=True):
            quoted = sum(len(rollout.search[i].tokens) for i in members)
            frame = len(group[0].prompt) - quoted
            assert 60 < frame < 256  # the templates' words, fewer than plan.longest_sequence allows for
            start = [token for i in members for token in rollout.search[i].tokens]
            kept = iter(group[0].prompt)
            assert all(token in kept for token in start)  # the candidates' ids verbatim, in order


def test_levels_are_simulated_as_they_are_rolled_out():
    of = simulated(*THREE_LEVELS)
    (rollout,), outline = of.rollouts([2]), of.outline(2)
    assert [trace.key for trace in rollout.traces()] == [trace.key for trace in outline.traces()]
    assert [trace.credit for trace in rollout.traces()] == [trace.credit for trace in outline.traces()]
    lengths = [len(trace.tokens) for trace in rollout.traces()]
    assert lengths == [len(trace.tokens) for trace in outline.traces()]
    assert [len(level.population()) for level in rollout.levels] == [16, 12]
    assert max(lengths[8:24]) <= 40 and max(lengths[24:]) <= 25
    assert longest_sequence(of.config) == 1024 + 256 + 2 * 4096 + 40


def test_a_trace_above_l_max_is_cut():
    of = simulated("rollout.search_max_new_tokens=30", *NO_TARGETS, lengths="fixed:50")
    lengths = [len(trace.tokens) for trace in of.outline(0).traces()]
    assert lengths == [30] * 8 + [50] * 16


def test_share_of_live_problems_is_that_of_binomial_rewards():
    """GRPO at a rate of 1/2 with 4 traces: live unless all four agree, 1 - 2 / 16."""
    grpo = ["credit.algorithm=grpo", "rollout.n_search=4", "rollout.n_sets=0", "rollout.set_size=0"]
    of = simulated(*grpo, "rollout.n_aggregations=0", *NO_TARGETS, solve_rate=0.5)
    found, live = liveness(of, 4000)
    assert found.share == pytest.approx(7 / 8, abs=4 * (7 / 64 / 4000) ** 0.5)
    assert len(live) == found.live and set(live) <= set(range(4000))
    assert liveness(simulated(solve_rate=1.0), 50)[1] == []


def test_a_prompt_shorter_than_the_templates_words_is_refused():
    of = Simulated(config_of(), Workload(parse_lengths("fixed:5"), 10, None))
    with pytest.raises(ConfigError, match="--prompt-tokens: 10 "):
        of.rollouts([0])


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("uniform:10:20", 10, 20, 15), ("fixed:7", 7, 7, 7), ("lognormal:100:0.5", 1, 1000, 100 * np.exp(0.125))],
)
def test_laws(text, low, high, mean):
    values = parse_lengths(text).sample(np.random.default_rng(0), 0, 20_000, 1000)
    assert values.min() >= low and values.max() <= high
    assert values.mean() == pytest.approx(mean, rel=0.03)


def test_usual_lengths_follow_l_max():
    law = usual_lengths(config_of("rollout.aggregation_max_new_tokens=80", *NO_TARGETS).rollout)
    search, aggregation = (law.sample(np.random.default_rng(0), level, 5000, 10**6) for level in (0, 1))
    assert (search.min(), search.max(), aggregation.min(), aggregation.max()) == pytest.approx(
        (512, 4096, 10, 80), rel=0.01
    )


def test_measured_lengths(tmp_path):
    (tmp_path / "lines").write_text("5\n6\n5\n")
    of_both = parse_lengths(str(tmp_path / "lines"))
    (tmp_path / "levels.json").write_text('{"search": [3], "aggregation": [8, 9]}')
    of_each = parse_lengths(str(tmp_path / "levels.json"))
    rng = np.random.default_rng(0)
    assert set(of_both.sample(rng, 1, 100, 50)) == {5, 6}
    assert set(of_each.sample(rng, 0, 100, 50)) == {3} and set(of_each.sample(rng, 1, 100, 50)) == {8, 9}


@pytest.mark.parametrize(
    "text", ["uniform:9:2", "uniform:9", "fixed:x", "lognormal:0:1", "nowhere", "fixed:nan", "uniform:1:1e12"]
)
def test_lengths_that_cannot_be_used(text):
    with pytest.raises(ConfigError, match="--lengths: ") as error:
        parse_lengths(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "1.5", "-3", '{"search": [1]}', '{"search": [0], "aggregation": [1]}', "{"])
def test_files_that_hold_no_lengths(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ConfigError, match="--lengths: ") as error:
        parse_lengths(str(tmp_path / "lengths"))
    assert "\n" not in str(error.value)


def test_lengths_of_a_run(tmp_path):
    from spiral_fast.record.trace_store import write_traces

    of = simulated(lengths="uniform:20:60")
    rollouts = of.rollouts([0, 1])
    write_traces(tmp_path / "traces", 1, rollouts)
    law = parse_lengths(str(tmp_path))
    search = {len(trace.tokens) for rollout in rollouts for trace in rollout.search}
    assert set(law.sample(np.random.default_rng(0), 0, 2000, 100)) == search
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        parse_lengths(str(tmp_path / "traces"))


def test_lengths_of_a_run_with_three_levels(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "traces").mkdir()
    rows = {"level": pa.array([0, 1, 2], pa.int8()), "length": pa.array([3, 8, 20], pa.int32())}
    pq.write_table(pa.table(rows), tmp_path / "traces" / "step_000001.parquet")
    law, rng = parse_lengths(str(tmp_path)), np.random.default_rng(0)
    assert [set(law.sample(rng, level, 50, 100)) for level in range(4)] == [{3}, {8}, {20}, {20}]
    assert "search 3, aggregation 8, aggregation_2 20" in law.text
