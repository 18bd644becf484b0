"""Problems from a file of one JSON object per line. A row that cannot be used stops the run; none is dropped."""

from __future__ import annotations

import json
from pathlib import Path

from spiral_fast.config import ConfigError
from spiral_fast.trace import Problem


def read_jsonl(
    path: str | Path, *, question_field: str = "question", answer_field: str = "answer", id_field: str | None = None
) -> list[Problem]:
    """All rows as problems, in file order; keys that are not used go to `Problem.data`.

    Without `id_field` the id is `<file name>:<line>`. Raises ConfigError naming file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no part of the first row
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name, bytes that are no text
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    problems: list[Problem] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            problem = _problem(
                line, f"{path}:{number}", f"{path.name}:{number}", question_field, answer_field, id_field
            )
            if problem.id in line_of:
                raise ConfigError(
                    f"{path}:{number}: the id {problem.id!r} is that of line {line_of[problem.id]} too; make ids unique"
                )
            line_of[problem.id] = number
            problems.append(problem)
    if not problems:
        raise ConfigError(f"{path}: holds no problem; write one JSON object per line")
    return problems


def _problem(
    line: str, where: str, default_id: str, question_field: str, answer_field: str, id_field: str | None
) -> Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ConfigError(f"{where}: not JSON ({error}): {_short(line)}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {_short(line)}")

    def text(field: str) -> str:
        if field not in row:
            raise ConfigError(
                f"{where}: the field {field!r} is missing; found {', '.join(map(repr, row)) or 'no field'}"
            )
        if not isinstance(row[field], str):
            raise ConfigError(f"{where}: the field {field!r} must be a string, found {_short(json.dumps(row[field]))}")
        if not row[field].strip():
            raise ConfigError(f"{where}: the field {field!r} is empty")
        try:
            row[field].encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer takes
            raise ConfigError(
                f"{where}: the field {field!r} holds a lone surrogate: {_short(ascii(row[field]))}"
            ) from None
        return row[field]

    used = {question_field, answer_field, id_field}
    return Problem(
        id=text(id_field) if id_field else default_id,
        question=text(question_field),
        answer=text(answer_field),
        data={key: value for key, value in row.items() if key not in used},
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
