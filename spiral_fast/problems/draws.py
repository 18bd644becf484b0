"""The order in which a run draws its training problems."""

from __future__ import annotations

import random
from functools import lru_cache


class Draws:
    """Draw i of the run, an index into the training problems: a function of (n, seed, shuffle) and i alone.

    Every epoch is a permutation of all n problems, a new one each epoch; without `shuffle` the file order repeats.
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True):
        if n < 1:
            raise ValueError("there is no training problem to draw")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self._epoch_order = lru_cache(maxsize=2)(self._order)

    def __getitem__(self, draw: int) -> int:
        if draw < 0:
            raise IndexError(f"draw {draw} is negative")
        epoch, place = divmod(draw, self.n)
        return self._epoch_order(epoch)[place]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.n))
        if self.shuffle:
            random.Random(f"draws/{self.seed}/{epoch}").shuffle(order)
        return order
