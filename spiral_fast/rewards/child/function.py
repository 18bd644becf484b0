"""A reward given by name: found, checked, called, and its result read."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ARGUMENTS = ("question", "answer", "completion", "finish_reason", "data")


class CannotLoad(ValueError):
    """One line for the user: why there is no such reward."""


def load_function(name: str) -> Callable[..., dict]:
    """The reward `module.sub.function` or `path/to/file.py:function`, as a call that raises nothing.

    The call takes ARGUMENTS and gives {"reward"} or {"reward", "answer"}, or {"reason"} for whatever went wrong.
    Raises CannotLoad.
    """
    place, _, leaf = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not leaf:
        raise CannotLoad(f"{name!r} names no function; write my_module.my_reward or path/to/file.py:my_reward")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    function = getattr(module, leaf, None)
    if function is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise CannotLoad(f"{place} has no {leaf!r}{_near(leaf, names)}")
    if not callable(function):
        raise CannotLoad(f"{name} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(*ARGUMENTS)
    except TypeError:
        raise CannotLoad(
            f"{name} takes {inspect.signature(function)}, but is called with ({', '.join(ARGUMENTS)})"
        ) from None
    except ValueError:  # a function in C that does not tell
        pass
    loop = asyncio.Runner()

    def reward(*arguments: Any) -> dict:
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = loop.run(_await(result))
            return read(result)
        except (Exception, SystemExit) as error:
            return {"reason": first_line(error)}

    return reward


def read(result: Any) -> dict:
    """What a reward returned: a number, a bool, or a pair with the answer it extracted. Raises TypeError."""
    pair = isinstance(result, tuple) and len(result) == 2
    number = result[0] if pair else result
    if hasattr(number, "item"):  # a number of numpy or torch
        number = number.item()
    if not isinstance(number, (int, float)):
        raise TypeError(f"the reward returned {_short(result)}, not a number or (number, answer)")
    if pair and not isinstance(result[1], str | None):
        raise TypeError(f"the reward returned {_short(result)}: the answer must be text or None")
    return {"reward": float(number)} | ({"answer": result[1]} if pair else {})


def first_line(error: BaseException) -> str:
    """The exception in one short line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


async def _await(result: Any) -> Any:
    return await result


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CannotLoad(f"{path}: no such file{_near(path.name, [p.name for p in path.parent.glob('*.py')])}")
    sys.path.insert(0, str(path.resolve().parent))  # as `python path/to/file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{path} cannot be imported: {first_line(error)}") from None
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(f"{missing}.")):  # something that the module imports
            raise CannotLoad(f"{name} cannot be imported: {first_line(error)}") from None
        parent, _, leaf = missing.rpartition(".")
        where = sys.modules[parent].__path__ if parent else sys.path
        names = [f"{parent}.{module.name}".lstrip(".") for module in pkgutil.iter_modules(where)]
        raise CannotLoad(f"there is no module {missing!r}{_near(missing, names)}") from None
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{name} cannot be imported: {first_line(error)}") from None


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"
