"""Rows of a file of one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from spiral_fast.config import ConfigError
from spiral_fast.problems.rows import Row, short


def jsonl_rows(path: str | Path) -> Iterator[Row]:
    """The rows in file order, empty lines passed over; lines are counted from 1.

    Raises ConfigError naming file and line: a broken file is never read around.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no part of the first row
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name, bytes that are no text
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    found = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            found = True
            yield Row(f"{path}:{number}", f"{path.name}:{number}", _object(line, f"{path}:{number}"))
    if not found:
        raise ConfigError(f"{path}: holds no problem; write one JSON object per line")


def _object(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ConfigError(f"{where}: not JSON ({error}): {short(line)}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {short(line)}")
    return row
