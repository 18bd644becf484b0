"""In which order prompts are prefilled, so that a server computes nothing that they share twice.

A server that gets prompts together computes what they share once for each. So each distinct prompt has a leader, a
request for no new token; its siblings follow it. A leader waits only for the one in flight that it shares most with,
and only where that is more than it shares with what is there already.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

ID_BYTES = 4


def encode(prompt: Sequence[int]) -> bytes:
    """Token ids as big-endian bytes, which sort and compare as the lists do, and fast."""
    return np.asarray(prompt, ">u4").tobytes()


def shared(a: bytes, b: bytes) -> int:
    """Tokens of the longest common prefix of two encoded prompts."""
    n = min(len(a), len(b)) // ID_BYTES
    if a[: n * ID_BYTES] == b[: n * ID_BYTES]:
        return n
    return int(np.argmax(np.frombuffer(a, ">u4", n) != np.frombuffer(b, ">u4", n)))


class Prefixes:
    """Encoded prompts, each any number of times, in sorted order: a neighbour there shares most with a prompt."""

    def __init__(self) -> None:
        self._prompts: list[bytes] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: bytes) -> None:
        insort(self._prompts, prompt)

    def remove(self, prompt: bytes) -> None:
        del self._prompts[bisect_left(self._prompts, prompt)]

    def nearest(self, prompt: bytes) -> tuple[int, bytes | None]:
        """(tokens shared, prompt) of the one that shares most; (0, None) where none shares anything."""
        at = bisect_left(self._prompts, prompt)
        found = max(((shared(prompt, other), other) for other in self._prompts[max(0, at - 1) : at + 1]), default=None)
        return found if found and found[0] else (0, None)


class Leaders:
    """The prompts of one server since its cache was last emptied: there (prefilled) and in flight."""

    def __init__(self) -> None:
        self._there = Prefixes()
        self._in_flight = Prefixes()

    def there(self, prompt: bytes) -> int:
        """Tokens of `prompt` that the server need not compute: all but the last at most."""
        return min(self._there.nearest(prompt)[0], len(prompt) // ID_BYTES - 1)

    def waits_for(self, prompt: bytes) -> bytes | None:
        """The prompt in flight whose end `prompt` must await; None when it can go."""
        tokens, other = self._in_flight.nearest(prompt)
        return other if min(tokens, len(prompt) // ID_BYTES - 1) > self.there(prompt) else None

    def start(self, prompt: bytes) -> None:
        """Its prefill begins."""
        self._in_flight.add(prompt)

    def finish(self, prompt: bytes) -> None:
        """Its prefill is done."""
        self._in_flight.remove(prompt)
        self._there.add(prompt)

    def prefilled(self, prompt: bytes) -> None:
        """It was prefilled by a request of its own, without a leader."""
        self._there.add(prompt)
