"""Every config key, from the typed config itself: `python -m spiral_fast.config_docs > docs/config.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spiral_fast.config import Config, section_of

HEAD = """# Config

A run is one YAML file: `spiral-fast train run.yaml`. Any key can be changed on the command line, `learner.steps=20`.
An unknown key, a value of the wrong type or a combination that cannot be run exactly is refused at start with one line.
`spiral-fast train run.yaml --dry-run` prints every value in force. Symbols are those of the paper (arXiv 2606.23595).

This page is written by `python -m spiral_fast.config_docs`.
"""


def markdown() -> str:
    tables = ["\n".join([f"## {title}", "", *_table(section, prefix)]) for title, section, prefix in _sections()]
    return HEAD + "\n" + "\n\n".join(tables) + "\n"


def _sections(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    yield prefix.removesuffix(".") or "Top level", section, prefix
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            yield from _sections(inner, f"{prefix}{name}.")


def _table(section: type[BaseModel], prefix: str) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in section.model_fields.items():
        if not section_of(field.annotation):
            cells = (f"`{prefix}{name}`", _type(field), _default(field), field.description or "")
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "none" if field.default is None else f"`{_yaml(field.default)}`"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _type(field: FieldInfo) -> str:
    return _name(field.annotation, tuple(field.metadata))


def _name(annotation: Any, bounds: tuple = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = [bound for info in arguments[1:] for bound in getattr(info, "metadata", [info])]
        return _name(arguments[0], tuple(inner))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(argument, bounds) for argument in arguments)
    if origin is list:
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return "keys and values"
    if annotation is type(None):
        return "none"
    name = {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]
    return ", ".join([name, *_bounds(bounds)]) if annotation in (int, float) else name


SIGNS = {annotated_types.Gt: ">", annotated_types.Ge: ">=", annotated_types.Lt: "<", annotated_types.Le: "<="}


def _bounds(bounds: tuple) -> Iterator[str]:
    for bound in bounds:
        if type(bound) in SIGNS:
            yield f"{SIGNS[type(bound)]} {getattr(bound, type(bound).__name__.lower())}"


if __name__ == "__main__":
    print(markdown(), end="")
