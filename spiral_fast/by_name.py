"""A function of the user's, found by its name. Standard library only: grading processes import this too."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class CannotLoad(ValueError):
    """One line for the user: why there is no such function."""


def find_function(name: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """`module.sub.function` or `path/to/file.py:function`, which is to be called with these positional arguments.

    Modules are also looked for in the current folder. Raises CannotLoad.
    """
    place, _, leaf = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not leaf or name.endswith(".py"):
        raise CannotLoad(f"{name!r} names no function; write my_module.my_function or path/to/file.py:my_function")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    function = getattr(module, leaf, None)
    if function is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise CannotLoad(f"{place} has no {leaf!r}{_near(leaf, names)}")
    if not callable(function):
        raise CannotLoad(f"{name} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise CannotLoad(
            f"{name} takes {inspect.signature(function)}, but is called with ({', '.join(arguments)})"
        ) from None
    except ValueError:  # a function in C that does not tell
        pass
    return function


def first_line(error: BaseException) -> str:
    """The exception in one short line."""
    try:
        lines = str(error).splitlines()
    except Exception:  # its own __str__ fails
        lines = []
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CannotLoad(f"{path}: no such file{_near(path.name, [p.name for p in path.parent.glob('*.py')])}")
    if path.stem in sys.stdlib_module_names:
        raise CannotLoad(f"{path} would hide Python's own module {path.stem!r}: give it another name")
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
        where = getattr(sys.modules[parent], "__path__", []) if parent else sys.path  # a plain module holds none
        names = [f"{parent}.{module.name}".lstrip(".") for module in pkgutil.iter_modules(where)]
        raise CannotLoad(f"there is no module {missing!r}{_near(missing, names)}") from None
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{name} cannot be imported: {first_line(error)}") from None


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
