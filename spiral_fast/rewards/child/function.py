"""A reward given by name: found, checked, called, and its result read."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from spiral_fast.by_name import find_function, first_line

LONGEST_ANSWER = 100_000  # bytes in UTF-8
ARGUMENTS = ("question", "answer", "completion", "finish_reason", "data")


def load_function(name: str) -> Callable[..., dict]:
    """The reward `module.sub.function` or `path/to/file.py:function`, as a call that raises nothing.

    The call takes ARGUMENTS and gives {"reward"} or {"reward", "answer"}, or {"reason"} for whatever went wrong.
    Raises CannotLoad.
    """
    function = find_function(name, ARGUMENTS)
    loop = asyncio.Runner()

    def reward(*arguments: Any) -> dict:
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = loop.run(_await(result))
            return read(result)
        except BaseException as error:  # also SystemExit, and CancelledError of an abandoned await
            return {"reason": first_line(error)}

    return reward


def read(result: Any) -> dict:
    """What a reward returned: a number, a bool, or a pair with the answer it extracted. Raises TypeError and
    ValueError."""
    pair = isinstance(result, tuple) and len(result) == 2
    number = result[0] if pair else result
    if hasattr(number, "item"):  # a number of numpy or torch
        number = number.item()
    if not isinstance(number, (int, float)):
        raise TypeError(f"the reward returned {_short(result)}, not a number or (number, answer)")
    if pair and not isinstance(result[1], str | None):
        raise TypeError(f"the reward returned {_short(result)}: the answer must be text or None")
    if pair and result[1] and len(result[1].encode()) > LONGEST_ANSWER:  # encode: half a surrogate pair is no text
        raise ValueError(f"the reward returned an answer of more than {LONGEST_ANSWER} bytes")
    return {"reward": float(number)} | ({"answer": result[1]} if pair else {})


async def _await(result: Any) -> Any:
    return await result


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"
