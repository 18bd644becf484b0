"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spiral_fast.config import ConfigError
from spiral_fast.problems.rows import Row


def parquet_rows(path: str | Path) -> Iterator[Row]:
    """The rows in file order, counted from 0 as pandas does. Raises ConfigError naming the file."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path.absolute()}: no such file")
    number = 0
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{path}: two columns are called {twice[0]!r}; rename one")
            for batch in file.iter_batches(1024):
                for values in batch.to_pylist():
                    yield Row(f"{path}: row {number}", f"{path.name}:{number}", values)
                    number += 1
    except (ArrowException, OSError, ValueError) as error:
        if isinstance(error, ConfigError):  # of whoever reads the rows
            raise
        raise ConfigError(f"{path}: cannot be read as Parquet ({' '.join(str(error).split())})") from None
    if not number:
        raise ConfigError(f"{path}: holds no row")
