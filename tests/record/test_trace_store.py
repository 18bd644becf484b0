from __future__ import annotations

from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_fast.config import ConfigError
from spiral_fast.record import trace_store
from spiral_fast.record.trace_store import read_rollouts, read_traces, write_traces
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey
from tests.record.run_of_three_steps import rollout

NEW_COLUMNS = {"outcome", "sets", "answer_found"}


def bits(logp: np.ndarray) -> bytes:
    assert logp.dtype == np.float32
    return logp.tobytes()


def same(a: ProblemRollout, b: ProblemRollout) -> None:
    assert (a.problem.id, a.problem.question, a.problem.answer) == (b.problem.id, b.problem.question, b.problem.answer)
    assert a.draw == b.draw and np.array_equal(a.sets, b.sets) and a.sets.shape == b.sets.shape
    assert a.sets.dtype == b.sets.dtype and [len(group) for group in a.aggregation] == [len(g) for g in b.aggregation]
    for left, right in zip(a.traces(), b.traces(), strict=True):
        for name in (field.name for field in fields(Trace)):
            x, y = getattr(left, name), getattr(right, name)
            if name == "logp":
                assert bits(x) == bits(y)
            else:
                assert repr(x) == repr(y), name  # tells 0.0 from -0.0 and takes NaN for NaN


def test_every_trace_comes_back(tmp_path):
    sample = rollout(draw=7)
    write_traces(tmp_path / "traces", 12, [sample, rollout(draw=8)])
    assert (tmp_path / "traces" / "step_000012.parquet").exists()
    rows = read_traces(tmp_path, 12).to_pylist()
    assert rows == read_traces(tmp_path).to_pylist() and len(rows) == 14
    for trace, row in zip(sample.traces(), rows, strict=False):
        assert (row["problem"], row["level"], row["set"], row["index"]) == trace.key
        assert row["tokens"] == trace.tokens and row["text"] == trace.text and row["length"] == len(trace.tokens)
        assert np.array_equal(np.array(row["logp"], np.float32), trace.logp)
        for name in ("reward", "verdict", "credit", "gated", "finish_reason", "policy_version"):
            assert row[name] == getattr(trace, name)
        assert row["answer_found"] == trace.answer
        assert row["step"] == 12 and row["draw"] == 7 and row["prompt_length"] == len(trace.prompt)


def test_no_prompt_is_stored_twice(tmp_path):
    write_traces(tmp_path / "traces", 1, [rollout()])
    rows = read_traces(tmp_path).to_pylist()
    assert [row["prompt"] for row in rows] == [[5, 6, 7], None, None, [5, 6, 7, 0], None, [5, 6, 7, 1], None]
    assert [row["question"] is None for row in rows] == [False] + [True] * 6
    assert [row["sets"] for row in rows] == [[[0, 2], [2, 1]]] + [None] * 6
    assert [row["members"] for row in rows] == [None] * 3 + [[0, 2]] * 2 + [[2, 1]] * 2


def test_outcomes(tmp_path):
    credits = [0.25, 0.0, 0.25, 0.25]
    rollouts = [rollout(draw, credit) for draw, credit in enumerate(credits)]
    for limit, surplus in ((None, "live"), (2, "discarded")):
        write_traces(tmp_path / "traces", 1, rollouts, limit)
        rows = read_traces(tmp_path).to_pylist()
        assert [row["outcome"] for row in rows[::7]] == ["live", "dead", "live", surplus]
        assert len({(row["draw"], row["outcome"]) for row in rows}) == 4


@st.composite
def rollouts(draw) -> ProblemRollout:
    """Any shape and any value, those included that a step skips: NaN, infinities, no token, no answer."""
    integer = st.integers(0, 2**31 - 1)
    number = draw(st.integers(0, 2**40))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    n_search, n_sets, size, n_aggregations = (draw(st.integers(low, 3)) for low in (1, 0, 1, 0))
    problem = Problem(draw(text), draw(text), draw(text))
    prompts: dict[int, list[int]] = {}

    def trace(level: int, set: int, index: int) -> Trace:
        tokens = draw(st.lists(integer, max_size=4))
        logp = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(tokens), max_size=len(tokens)))
        return Trace(
            TraceKey(problem.id, level, set, index),
            prompts.setdefault(set, draw(st.lists(integer, max_size=3))),
            tokens,
            np.array(logp, np.uint32).view(np.float32),  # every float32 there is
            draw(st.sampled_from(["stop", "length"])),
            draw(integer),
            draw(text),
            draw(st.none() | st.floats()),
            draw(st.sampled_from([None, "correct", "wrong", "could_not_grade"])),
            draw(st.none() | text),
            draw(st.floats()),
            draw(st.booleans()),
        )

    sets = [draw(st.lists(st.integers(0, n_search - 1), min_size=size, max_size=size)) for _ in range(n_sets)]
    search = [trace(SEARCH, -1, i) for i in range(n_search)]
    aggregation = [[trace(AGGREGATION, k, j) for j in range(n_aggregations)] for k in range(n_sets)]
    return ProblemRollout(
        problem, number, search, np.array(sets, np.int64) if sets else np.zeros((0, 0), np.int64), aggregation
    )


@settings(max_examples=60, deadline=None)
@given(written=st.lists(rollouts(), max_size=3, unique_by=lambda rollout: rollout.draw))
def test_rollouts_come_back_as_they_were_to_the_bit(tmp_path_factory, written):
    path = write_traces(tmp_path_factory.mktemp("run") / "traces", 1, written)
    for before, after in zip(written, read_rollouts(path), strict=True):
        same(before, after)


def as_an_older_version(path) -> None:
    """Without the newer columns and the aggregation prompts."""
    table = pq.read_table(path).drop_columns(list(NEW_COLUMNS))
    prompts = [row["prompt"] if row["level"] == SEARCH else None for row in table.to_pylist()]
    prompts = pa.array(prompts, pa.list_(pa.int32()))
    pq.write_table(table.set_column(table.schema.get_field_index("prompt"), "prompt", prompts), path)


def test_a_file_of_an_older_version_is_read_and_not_replayed(tmp_path):
    path = write_traces(tmp_path / "traces", 1, [rollout()])
    whole = read_traces(tmp_path).to_pylist()
    as_an_older_version(path)
    old = read_traces(tmp_path).to_pylist()
    assert [row["text"] for row in old] == [row["text"] for row in whole]
    assert all(row[name] is None for row in old for name in NEW_COLUMNS)
    with pytest.raises(ConfigError, match=r"step_000001.parquet: an older version wrote it, without the sets"):
        read_rollouts(path)


def test_a_damaged_file_is_one_line_that_names_it(tmp_path):
    path = tmp_path / "step_000001.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="step_000001.parquet: cannot be read") as error:
        read_rollouts(path)
    assert "\n" not in str(error.value)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(table, path, **_):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(trace_store.pq, "write_table", fail)
    with pytest.raises(OSError):
        write_traces(tmp_path / "traces", 1, [rollout()])
    assert list((tmp_path / "traces").iterdir()) == []


def test_a_run_without_traces_reads_as_empty(tmp_path):
    assert read_traces(tmp_path).num_rows == 0
