from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.record import trace_store
from spiral_fast.record.trace_store import read_traces, write_traces
from tests.record.run_of_three_steps import rollout


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
        assert row["step"] == 12 and row["draw"] == 7 and row["prompt_length"] == 3


def test_no_prompt_is_stored_twice(tmp_path):
    write_traces(tmp_path / "traces", 1, [rollout()])
    rows = read_traces(tmp_path).to_pylist()
    assert [row["prompt"] for row in rows] == [[5, 6, 7]] + [None] * 6
    assert [row["question"] is None for row in rows] == [False] + [True] * 6
    assert [row["members"] for row in rows] == [None] * 3 + [[0, 2]] * 2 + [[2, 1]] * 2


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
