"""Ctrl-C and SIGTERM end a run soon, and never in the middle of an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def result_of(future: Future[T]) -> T:
    """`future.result()`, within a second of a Ctrl-C also when that came just as the wait began: a signal between
    Python's last look at it and the wait itself does not end the wait."""
    while not future.done():
        wait([future], timeout=1.0)
    return future.result()


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: handled like Ctrl-C, told apart by its exit code."""


def _terminate(*_) -> None:
    raise Terminated


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within, SIGTERM raises Terminated. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM are remembered; on leaving they go to whoever handled them before: an enclosing block
    of this kind, else sigterm_raises or Python. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for number in dict.fromkeys(received):
        signal.raise_signal(number)
