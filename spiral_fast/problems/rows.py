"""A row of a file or data set as a problem, with one-line errors that name where the row is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from spiral_fast.config import ConfigError, ProblemsConfig
from spiral_fast.trace import Problem


@dataclass(frozen=True)
class Row:
    where: str  # `data/train.jsonl:17`, `data/train.parquet: row 17`, `openai/gsm8k (main, train): row 17`
    default_id: str  # of the problem unless a field holds its id
    values: dict[str, Any]


class BadRow(ConfigError):
    """A row that is no problem. `reason`: the same words for all rows that are wrong in the same way."""

    def __init__(self, row: Row, reason: str, detail: str = ""):
        super().__init__(f"{row.where}: {reason}{detail}")
        self.reason = reason


@dataclass(frozen=True)
class Fields:
    """Which keys of a row hold what. A key is the whole name, or a path of names and list places with dots."""

    question: str = "question"
    answer: str = "answer"
    id: str | None = None  # none: Row.default_id
    answer_pattern: str | None = None  # one group: the answer, found once in the answer field
    numbers_as_text: bool = False


def train_fields(problems: ProblemsConfig) -> Fields:
    return Fields(
        problems.question_field,
        problems.answer_field,
        problems.id_field,
        problems.answer_pattern,
        problems.numbers_as_text,
    )


def eval_fields(problems: ProblemsConfig) -> Fields:
    own, train = problems.eval_fields, train_fields(problems)
    return Fields(
        own.question or train.question,
        own.answer or train.answer,
        own.id or train.id,
        own.answer_pattern or train.answer_pattern,
        train.numbers_as_text,
    )


def problem_of(row: Row, fields: Fields) -> Problem:
    """Top-level keys that are not used go to `Problem.data`. Raises BadRow."""
    question = _text(row, fields.question)
    answer = _text(row, fields.answer, fields.numbers_as_text, hinted=True)
    if fields.answer_pattern is not None:
        answer = _matched(row, fields.answer, answer, fields.answer_pattern)
    id = row.default_id
    if fields.id is not None:
        value = value_at(row, fields.id)
        id = str(value) if _is_integer(value) else _text(row, fields.id)
    used = {fields.question, fields.answer, fields.id}
    kept = {_encodable(row, key, key): _plain(row, key, v) for key, v in row.values.items() if key not in used}
    return Problem(id, question, answer, kept)


def value_at(row: Row, name: str) -> Any:
    """What the row holds under the key `name`. Raises BadRow, naming the keys there are."""
    value: Any = row.values
    if name in value:
        return value[name]
    for part in name.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isascii() and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise BadRow(row, f"the field {name!r} is missing", f"; found {_held(value)}")
    return value


def short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _text(row: Row, name: str, numbers: bool = False, hinted: bool = False) -> str:
    """`numbers`: a number stands for its spelling. `hinted`: where not, the error says how it would."""
    value = value_at(row, name)
    spelled = _is_integer(value) or (isinstance(value, float) and math.isfinite(value))
    if spelled and numbers:
        return json.dumps(value)
    if not isinstance(value, str):
        hint = "; set problems.numbers_as_text to take it as text" if spelled and hinted else ""
        raise BadRow(row, f"the field {name!r} must be a string", f", found {_shown(value)}{hint}")
    if not value.strip():
        raise BadRow(row, f"the field {name!r} is empty")
    return _encodable(row, name, value)


def _encodable(row: Row, name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer and no file takes
        raise BadRow(row, f"the field {name!r} holds a lone surrogate", f": {short(ascii(text))}") from None
    return text


def _matched(row: Row, name: str, text: str, pattern: str) -> str:
    found = [match.group(1) for match in re.finditer(pattern, text)]
    if len(found) != 1:
        times = f"is found {len(found)} times instead of once"
        raise BadRow(row, f"problems.answer_pattern does not fit the field {name!r}", f": it {times} in {_shown(text)}")
    if not (found[0] or "").strip():
        raise BadRow(row, f"problems.answer_pattern finds an empty answer in the field {name!r}", f": {_shown(text)}")
    return found[0].strip()


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _shown(value: Any) -> str:
    return short(json.dumps(value, default=lambda other: f"<{type(other).__name__}>"))


def _held(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(map(repr, value)) or "no field"
    return f"a list of {len(value)}" if isinstance(value, list) else _shown(value)


def _plain(row: Row, key: str, value: Any) -> Any:
    """`value` as JSON would give it back: what is kept is recorded, and handed to reward processes."""
    if isinstance(value, str):
        return _encodable(row, key, value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {_encodable(row, key, str(name)): _plain(row, key, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(row, key, item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    raise BadRow(row, f"the field {key!r} holds {type(value).__name__}, which is no text, number or list of such")


def number(row: Row, name: str) -> float:
    """The field as a number; text such as 3/8 counts as one. Raises BadRow."""
    value = value_at(row, name)
    found = math.nan
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        if _is_number(value):
            found = float(value)
        elif isinstance(value, str):
            top, slash, bottom = value.partition("/")
            found = float(top) / float(bottom) if slash else float(top)
    if math.isfinite(found):
        return found
    raise BadRow(row, f"the field {name!r} is no number", f": {_shown(value)}")


def problems_of(rows: Iterator[Row], fields: Fields) -> list[Problem]:
    """All rows as problems; the first bad row raises BadRow."""
    ids = UniqueIds()
    return [ids.add(row, problem_of(row, fields)) for row in rows]


class UniqueIds:
    """Refuses the second row of one id."""

    def __init__(self):
        self._first: dict[str, str] = {}

    def add(self, row: Row, problem: Problem) -> Problem:
        first = self._first.setdefault(problem.id, row.where)
        if first is not row.where:
            raise BadRow(row, "its id is taken", f": {problem.id!r} is the id of {first} too; make ids unique")
        return problem
