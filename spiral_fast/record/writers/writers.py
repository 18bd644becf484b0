"""The writers a config names. metrics.jsonl is the truth: one that fails midway is left out from then on, with one
warning line."""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from spiral_fast.config import Config, ConfigError

IMPORTS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}  # what each writer needs


class Writer(Protocol):
    """One viewer. Any method may raise anything."""

    def __init__(self, run_dir: Path, config: Config): ...

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """A resumed run makes the steps after `step` again."""

    def close(self) -> None: ...


class Writers:
    """Those named in record.writers, each of which goes on with what it holds of `run_dir`.

    `say` prints one line. Raises ConfigError when one is not installed or, in a new run, does not start.
    """

    def __init__(self, run_dir: Path, config: Config, say: Callable[[str], None], *, resume: bool = False):
        refuse_missing_writers(config)
        self.say = say
        self.writers: dict[str, Writer] = {}
        for name in config.record.writers:
            try:
                self.writers[name] = _make(name, run_dir, config)
            except Exception as error:
                if not resume:
                    self.close()
                    raise ConfigError(f"record.writers: {name} does not start ({_one_line(error)})") from error
                self._left_out(name, error)

    def scalars(self, step: int, values: dict[str, Any]) -> None:
        """The finite numbers among `values`."""
        self._each("scalars", step, {key: float(value) for key, value in values.items() if _is_finite(value)})

    def rewind(self, step: int) -> None:
        self._each("rewind", step)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        for name, writer in list(self.writers.items()):
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:
                del self.writers[name]
                self._left_out(name, error)

    def _left_out(self, name: str, error: Exception) -> None:
        self.say(f"  warning: {name} failed and is left out from here on ({_one_line(error)}); metrics.jsonl goes on")


def refuse_missing_writers(config: Config) -> None:
    """Raise ConfigError naming the install command of a writer whose package is missing."""
    from spiral_fast.doctor import package_of

    for name in config.record.writers:
        if importlib.util.find_spec(IMPORTS[name]) is None:
            raise ConfigError(
                f"record.writers: {name!r} needs the package {IMPORTS[name]}; run: {package_of(IMPORTS[name]).install}"
            )


def kept_name(run_dir: Path, writer: str) -> str:
    """The name, unlike any other run's, under which a writer knows this run: made once, kept in the run's folder."""
    file = run_dir / f"{writer}_name.txt"
    if not file.exists():
        file.write_text(f"{run_dir.resolve().name}-{secrets.token_hex(4)}\n")
    return file.read_text().strip()


def _make(name: str, run_dir: Path, config: Config) -> Writer:
    if name == "tensorboard":
        from spiral_fast.record.writers.tensorboard import TensorBoard as Chosen
    elif name == "wandb":
        from spiral_fast.record.writers.wandb import Wandb as Chosen
    else:
        from spiral_fast.record.writers.trackio import Trackio as Chosen
    return Chosen(run_dir, config)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except TypeError:  # None, a list
        return False


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
