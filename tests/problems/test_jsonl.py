from __future__ import annotations

import json

import pytest

from spiral_fast.config import ConfigError
from spiral_fast.problems.jsonl import jsonl_rows
from spiral_fast.problems.rows import Fields, problems_of

GOOD = '{"question": "1+1", "answer": "2"}'


def read_jsonl(path, **fields):
    return problems_of(jsonl_rows(path), Fields(**fields))


def write(tmp_path, *lines: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_keep_order_and_other_keys(tmp_path):
    rows = [{"q": f"öäü \u2028 {i}", "a": str(i), "name": f"n{i}", "level": i} for i in range(5)]
    path = write(tmp_path, *(json.dumps(row, ensure_ascii=False) for row in rows), "", "   ")
    problems = read_jsonl(path, question="q", answer="a", id="name")
    assert [(p.id, p.question, p.answer, p.data) for p in problems] == [
        (row["name"], row["q"], row["a"], {"level": row["level"]}) for row in rows
    ]


def test_without_an_id_field_the_id_is_file_and_line(tmp_path):
    assert [problem.id for problem in read_jsonl(write(tmp_path, GOOD, "", GOOD))] == ["rows.jsonl:1", "rows.jsonl:3"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text(GOOD + "\r\n" + GOOD + "\r\n", encoding="utf-8-sig")
    assert [problem.question for problem in read_jsonl(path)] == ["1+1", "1+1"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "1+1", "answer": ', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"question": "1+1", "answer": "2", "n": ' + "1" * 5000 + "}", "not JSON"),
        ('["1+1", "2"]', "expected an object"),
        ('{"question": "1+1"}', "'answer' is missing"),
        ("{}", "'question' is missing"),
        ('{"question": "1+1", "answer": ""}', "'answer' is empty"),
        ('{"question": " \\n", "answer": "2"}', "'question' is empty"),
        ('{"question": "1+1", "answer": 2}', "'answer' must be a string, found 2; set problems.numbers_as_text"),
        ('{"question": "1+1", "answer": null}', "'answer' must be a string, found null"),
        ('{"question": "\\ud800", "answer": "2"}', "lone surrogate"),
        ('{"question": "1+1", "answer": "2", "level": "\\ud800"}', "the field 'level' holds a lone surrogate"),
        ('{"question": "1+1", "answer": "2", "of": {"\\ud800": 1}}', "the field 'of' holds a lone surrogate"),
        ('{"question": "1+1", "answer": "2", "\\ud800": 1}', "holds a lone surrogate"),
        ('{"question": "1+1", "answer": "1", "answer": "2"}', "the key 'answer' is given twice"),
        ("\x1b[2J", "not JSON (Expecting value: line 1 column 1 (char 0)): '\\x1b[2J'"),
        ('{"question": 7, "answer": "2"}', "'question' must be a string, found 7"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path, line, says):
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ConfigError) as error:
        read_jsonl(path)
    assert f"{path}:2: " in str(error.value) and says in str(error.value) and "\n" not in str(error.value)


def test_a_duplicate_id_names_both_lines(tmp_path):
    row = '{"id": "x", "question": "1+1", "answer": "2"}'
    path = write(tmp_path, row, row.replace('"x"', '"y"'), row)
    with pytest.raises(ConfigError, match=r"rows.jsonl:3: its id is taken: 'x' is the id of .*rows.jsonl:1 too"):
        read_jsonl(path, id="id")


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_jsonl(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="holds no problem"):
        read_jsonl(write(tmp_path, "", " "))
    for path in (tmp_path / "nul\0.jsonl", tmp_path, tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_jsonl(path)
    (tmp_path / "bytes.jsonl").write_bytes(f"{GOOD}\n{GOOD}\n\xe9\n".encode("latin1"))
    with pytest.raises(ConfigError, match=r"bytes.jsonl:3: not UTF-8 \(.*\); convert the file$"):
        read_jsonl(tmp_path / "bytes.jsonl")
