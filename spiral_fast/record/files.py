"""The files of a run, each whole or absent: written aside, then renamed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spiral_fast.config import ConfigError


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields the path to write to; on success it takes the name `path`, on failure it is removed."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    with written_aside(path) as aside:
        aside.write_text(json.dumps(finite(content), indent=1) + "\n")


def finite(content: Any) -> Any:
    """`content` with NaN and infinities as null, which JSON lacks, and numpy scalars as Python's."""
    if isinstance(content, dict):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    if hasattr(content, "tolist"):  # numpy scalars and arrays
        return finite(content.tolist())
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists()


def refuse_other_run(run_dir: str | Path) -> None:
    """Raise ConfigError when `run_dir` already holds a run; nothing of it is ever overwritten."""
    if holds_run(Path(run_dir)):
        raise ConfigError(f"run_dir: {str(run_dir)!r} already holds a run; name another folder or delete this one")
