"""The files of a run, each whole or absent: written aside, then renamed."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spiral_fast.config import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space on the disk, in the quota, for so large a file
UNRECORDED = "step_000000"  # the checkpoint of a run that ended before its first step


class CannotWrite(OSError):
    """A file could not be written (a full disk, say); the message is one line for the user."""


def cannot_write(error: BaseException | None) -> str | None:
    """One line on the failed write among `error` and what it followed from; None if it has nothing to do with the disk.

    safetensors' error is not an OSError: it says "os error 28" in its text.
    """
    full = None
    while error is not None:
        if isinstance(error, CannotWrite):
            return str(error)
        full = _full(error) or full
        error = error.__cause__ or error.__context__
    return full


def _full(error: BaseException) -> str | None:
    known = isinstance(error, OSError) and error.errno in FULL
    if known or re.search(rf"os error ({'|'.join(map(str, FULL))})\b", str(error)):
        return " ".join(str(error).split())
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, an OSError, and safetensors' error on a full disk, becomes CannotWrite, naming `path`."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(f"{path}: cannot be written ({error.strerror or error})") from error
    except Exception as error:
        reason = _full(error)
        if reason is None:
            raise
        raise CannotWrite(f"{path}: cannot be written ({reason})") from error


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields the path to write to; on success it takes the name `path`, on failure it is removed.

    Raises CannotWrite.
    """
    aside = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            yield aside
            sync(aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Onto the disk itself: what was recorded must also survive the machine's end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def by_step(folder: Path, suffix: str = "") -> dict[int, Path]:
    """step -> `folder`/step_000123`suffix`, ascending. Other names, step_000123_mine say, are the user's."""
    matches = (
        (re.fullmatch(rf"step_(\d{{6,}}){re.escape(suffix)}", path.name), path) for path in folder.glob("step_*")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def holds_run(folder: Path) -> bool:
    """Whether a run was begun there, recorded or not."""
    return (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists()


def refuse_other_run(run_dir: str | Path) -> None:
    """Raise ConfigError when `run_dir` holds what a run recorded; nothing of that is ever overwritten.

    A start that failed before its first evaluation or step recorded nothing and may be made again in the same folder.
    """
    folder = Path(run_dir)
    metrics = folder / "metrics.jsonl"
    checkpoints = by_step(folder / "checkpoints").keys() - {0}
    if (metrics.exists() and metrics.stat().st_size) or any(folder.glob("eval_*.json")) or checkpoints:
        raise ConfigError(
            f"run_dir: {str(run_dir)!r} already holds a run; go on with it by spiral-fast train --resume {run_dir}, "
            "name another folder or delete this one"
        )


def refuse_unwritable(key: str, folder: Path, longest_name: str = "") -> None:
    """Raise ConfigError naming `key` unless files with names of that length can be made in `folder`.

    `folder` need not exist; nothing is left behind.
    """
    made = []
    try:
        for part in reversed([folder, *folder.parents]):
            if not part.exists():
                part.mkdir(exist_ok=True)
                made.append(part)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=longest_name or None):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: {str(folder)!r} cannot be written to ({reason}); name another folder") from None
    finally:
        with suppress(OSError):  # another process uses it by now
            for part in reversed(made):
                part.rmdir()
