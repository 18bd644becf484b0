"""Rows of a file of one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        raise ConfigError(f"{path.absolute()}: no such file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 ({error.reason}); convert the file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            found = True
            yield Row(f"{path}:{number}", f"{path.name}:{number}", _object(line, f"{path}:{number}"))
    if not found:
        raise ConfigError(f"{path}: holds no problem; write one JSON object per line")


def _object(line: str, where: str) -> dict:
    try:
        row = json.loads(line, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ConfigError(f"{where}: not JSON ({error}): {short(repr(line))}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {short(repr(line))}")
    return row


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The last of equal keys would win silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found
