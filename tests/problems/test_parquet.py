from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spiral_fast.config import ConfigError
from spiral_fast.problems.parquet import parquet_rows
from spiral_fast.problems.rows import Fields, problems_of


def write(tmp_path, rows, **options):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_rows_keep_order_over_row_groups_and_their_nested_values(tmp_path):
    rows = [
        {"question": f"öäü {i}", "answer": str(i), "extra_info": {"index": i, "tags": ["x"]}, "d": f"{i % 8}/8"}
        for i in range(2500)
    ]
    problems = problems_of(parquet_rows(write(tmp_path, rows, row_group_size=700)), Fields())
    assert [(p.id, p.question, p.answer, p.data) for p in problems] == [
        (f"file.parquet:{i}", f"öäü {i}", str(i), {"extra_info": {"index": i, "tags": ["x"]}, "d": f"{i % 8}/8"})
        for i in range(2500)
    ]


def test_a_bad_row_names_file_and_row(tmp_path):
    rows = [{"question": "q", "answer": "a"}] * 1030 + [{"question": "q", "answer": None}]
    path = write(tmp_path, rows)
    with pytest.raises(ConfigError) as error:
        problems_of(parquet_rows(path), Fields())
    assert str(error.value) == f"{path}: row 1030: the field 'answer' must be a string, found null"


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="missing.parquet: no such file"):
        list(parquet_rows(tmp_path / "missing.parquet"))
    (tmp_path / "text.parquet").write_text('{"question": "q"}\n')
    whole = write(tmp_path, [{"question": "q", "answer": "a"}]).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    for path in (tmp_path / "text.parquet", tmp_path / "cut.parquet", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read as Parquet") as error:
            list(parquet_rows(path))
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="holds no row"):
        pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "none.parquet")
        list(parquet_rows(tmp_path / "none.parquet"))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([["q"], ["1"], ["2"]], names=["question", "answer", "answer"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match="twice.parquet: two columns are called 'answer'"):
        list(parquet_rows(tmp_path / "twice.parquet"))
