"""In place of numpy's generator: walks every sequence of choices of a sampler, each with its exact probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction


class _Replay:
    """`integers(high)` follows a given path of choices and extends it by zeros."""

    def __init__(self, path: list[int]):
        self.path, self.highs = path, []

    def integers(self, high: int) -> int:
        if len(self.highs) == len(self.path):
            self.path.append(0)
        self.highs.append(int(high))
        return self.path[len(self.highs) - 1]


def all_outcomes(sample: Callable) -> Iterator[tuple[object, Fraction]]:
    """Every (outcome, probability) of `sample(rng)`, whose randomness is `rng.integers(high)` alone."""
    path: list[int] = []
    while True:
        rng = _Replay(path)
        outcome = sample(rng)
        probability = Fraction(1)
        for high in rng.highs:
            probability /= high
        yield outcome, probability
        while path and path[-1] + 1 == rng.highs[len(path) - 1]:  # next path in lexicographic order
            path.pop()
        if not path:
            return
        path[-1] += 1


def distribution(sample: Callable) -> dict:
    """outcome -> probability, summed over all sequences of choices."""
    total: dict = {}
    for outcome, probability in all_outcomes(sample):
        total[outcome] = total.get(outcome, 0) + probability
    return total
