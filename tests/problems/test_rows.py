from __future__ import annotations

import datetime
import decimal
import json

import pytest

from spiral_fast.config import ConfigError, ProblemsConfig
from spiral_fast.problems.rows import BadRow, Fields, Row, eval_fields, number, problem_of, problems_of, value_at


def row(**values) -> Row:
    return Row("file.parquet: row 17", "file.parquet:17", values)


NESTED = {
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "extra_info": {"answer": "7", "index": 3},
    "a.b": "whole name",
    "a": {"b": "inside"},
}


def test_dots_step_into_objects_and_lists():
    assert value_at(row(**NESTED), "prompt.1.content") == "q"
    assert value_at(row(**NESTED), "a.b") == "whole name"  # a key that has the dot in its name comes first
    problem = problem_of(row(**NESTED), Fields("prompt.1.content", "extra_info.answer", "extra_info.index"))
    assert (problem.id, problem.question, problem.answer) == ("3", "q", "7")
    assert problem.data == NESTED  # what is used inside a key stays there


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nothing", "found 'prompt', 'extra_info', 'a.b', 'a'"),
        ("extra_info.nothing", "found 'answer', 'index'"),
        ("prompt.2.content", "found a list of 2"),
        ("prompt.-1.content", "found a list of 2"),
        ("extra_info.answer.x", 'found "7"'),
    ],
)
def test_a_missing_field_says_what_there_is(name, found):
    with pytest.raises(BadRow) as error:
        value_at(row(**NESTED), name)
    assert str(error.value) == f"file.parquet: row 17: the field {name!r} is missing; {found}"


@pytest.mark.parametrize(
    ("answer", "fields", "expected"),
    [
        (42, {"numbers_as_text": True}, "42"),
        (0.5, {"numbers_as_text": True}, "0.5"),
        (42.0, {"numbers_as_text": True}, "42.0"),
        ("Add 40 and 2.\n#### 1,042", {"answer_pattern": "#### (.+)"}, "1,042"),
        ("#### 42 \n", {"answer_pattern": "#### (.+)"}, "42"),
        ("<think>3</think> 5", {"answer_pattern": r"</think>\s*(.+)$"}, "5"),
    ],
)
def test_answers_that_are_mapped(answer, fields, expected):
    assert problem_of(row(question="q", answer=answer), Fields(**fields)).answer == expected


@pytest.mark.parametrize(
    ("answer", "fields", "says"),
    [
        (42, {}, "the field 'answer' must be a string, found 42; set problems.numbers_as_text to take it as text"),
        (float("nan"), {"numbers_as_text": True}, "the field 'answer' must be a string, found NaN"),
        (True, {"numbers_as_text": True}, "the field 'answer' must be a string, found true"),
        (None, {"numbers_as_text": True}, "the field 'answer' must be a string, found null"),
        ([1], {}, "the field 'answer' must be a string, found [1]"),
        (b"x", {}, "the field 'answer' must be a string, found \"<bytes>\""),
        ("no mark", {"answer_pattern": "#### (.+)"}, 'is found 0 times instead of once in "no mark"'),
        ("#### 1\n#### 2", {"answer_pattern": "#### (.+)"}, "is found 2 times instead of once"),
        ("####  ", {"answer_pattern": "####(.+)"}, "finds an empty answer in the field 'answer'"),
    ],
)
def test_answers_that_are_refused(answer, fields, says):
    with pytest.raises(ConfigError) as error:
        problem_of(row(question="q", answer=answer), Fields(**fields))
    assert str(error.value).startswith("file.parquet: row 17: ") and says in str(error.value)
    assert "\n" not in str(error.value)


def test_kept_data_is_what_json_gives_back():
    kept = {
        "day": datetime.date(2026, 7, 1),
        "price": decimal.Decimal("1.50"),
        "nested": {"list": [1, None, {"t": datetime.datetime(2026, 7, 1, 12)}], 3: "key"},
    }
    data = problem_of(row(question="q", answer="a", **kept), Fields()).data
    assert json.loads(json.dumps(data)) == data
    assert data == {
        "day": "2026-07-01",
        "price": "1.50",
        "nested": {"list": [1, None, {"t": "2026-07-01T12:00:00"}], "3": "key"},
    }
    with pytest.raises(BadRow, match=r"row 17: the field 'image' holds bytes, which is no text"):
        problem_of(row(question="q", answer="a", image={"bytes": b"\x89"}), Fields())


def test_an_integer_of_any_length_can_be_an_answer():
    assert problem_of(row(question="q", answer=10**400), Fields(numbers_as_text=True)).answer == "1" + "0" * 400


def test_a_question_is_never_a_number():
    with pytest.raises(BadRow, match="'question' must be a string, found 5$"):
        problem_of(row(question=5, answer="5"), Fields(numbers_as_text=True))


@pytest.mark.parametrize(("value", "expected"), [("3/8", 0.375), (3, 3.0), (0.5, 0.5), ("0.25", 0.25), (" 7 ", 7.0)])
def test_numbers(value, expected):
    assert number(row(level=value), "level") == expected


@pytest.mark.parametrize("value", ["hard", "1/0", "", None, True, "1/2/3", [1], "nan", "inf", float("nan"), 10**400])
def test_what_is_no_number(value):
    with pytest.raises(BadRow, match="file.parquet: row 17: the field 'level' is no number"):
        number(row(level=value), "level")


def test_ids_are_unique_over_text_and_number():
    rows = [Row(f"f:{i}", f"f:{i}", {"question": "q", "answer": "a", "id": id}) for i, id in enumerate(["1", 2, 1])]
    with pytest.raises(BadRow, match="f:2: its id is taken: '1' is the id of f:0 too"):
        problems_of(iter(rows), Fields(id="id"))


def test_evaluation_fields_are_those_of_training_unless_given():
    source = ProblemsConfig(source="hub", question_field="problem", answer_pattern="#### (.+)")
    assert eval_fields(source) == Fields("problem", "answer", None, "#### (.+)")
    own = ProblemsConfig(source="hub", question_field="problem", eval_fields={"question": "q", "id": "n"})
    assert eval_fields(own) == Fields("q", "answer", "n")
