"""Which micro-batches a step consists of, and which rank runs which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from spiral_fast import ranks
from spiral_fast.config import LearnerConfig
from spiral_fast.learner.cost import Cost
from spiral_fast.learner.packed import Packed, pack
from spiral_fast.learner.roles import Roles
from spiral_fast.learner.rows import Row
from spiral_fast.learner.sharing import Part, Paths, cut, cut_flat, paths_of
from spiral_fast.learner.trees import pack_tree


class _OfRole(NamedTuple):
    """A micro-batch of one adapter's rows."""

    role: str
    rows: list[Row]  # all of the role
    indices: list[int]  # of them among the rows of all roles
    paths: Paths | None  # of the role's rows; None: nothing is shared
    part: Part  # of the role's rows


class MicroBatches:
    """Rows cut into micro-batches, each of one adapter's rows, and dealt to the ranks.

    Every rank has all rows and makes the same cut and the same deal; it packs its own micro-batches alone. There is a
    multiple of as many micro-batches as ranks where there are rows enough. They are run in rounds, one a rank: all
    ranks make equal numbers of forwards and backwards, as gathering sharded weights needs. A round is of one adapter,
    so that an adapter with rows has a gradient on every rank; a rank that has none in its last round runs one token of
    weight 0.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        config: LearnerConfig,
        cost: Cost,
        roles: Roles,
        device: torch.device,
        load: list[float] | None = None,
    ):
        """load: FLOPs each rank has in this step already; those of its micro-batches are added."""
        self._device = device
        load = [0.0] * ranks.size() if load is None else load
        self._rounds: list[list[_OfRole | None]] = []
        for role, indices in roles.split([row.level for row in rows]).items():
            of_role, paths = [rows[i] for i in indices], None
            if config.sharing == "none":
                parts = cut_flat(of_role, config.micro_batch_tokens, cost, times=ranks.size())
            else:
                paths = paths_of(of_role, config.sharing)
                parts = cut(of_role, paths, config.micro_batch_tokens, cost, times=ranks.size())
            found = [_OfRole(role, of_role, indices, paths, part) for part in parts]
            dealt = deal([part.flops for part in parts], load)
            self._rounds += [[None if i is None else found[i] for i in turn] for turn in dealt]

    def __iter__(self) -> Iterator[tuple[list[int], Packed]]:
        """This rank's: indices of the rows of each micro-batch, and these rows packed in that order; no index for the
        token of weight 0."""
        for turn in self._rounds:
            one = turn[ranks.rank()]
            if one is None:
                yield [], pack([([0], [0])], self._device, next(other.role for other in turn if other))
                continue
            part = one.part.rows
            if one.paths is None:
                packed = pack([(one.rows[i].prompt, one.rows[i].tokens) for i in part], self._device, one.role)
            else:
                packed = pack_tree(one.rows, one.paths, part, self._device, one.role)
            yield [one.indices[i] for i in part], packed

    @property
    def most_rows_first(self) -> int:
        """Of the micro-batches of the first round."""
        return max(len(one.part.rows) for one in self._rounds[0] if one)


def deal(flops: Sequence[float], load: list[float]) -> list[list[int | None]]:
    """[round][rank]: which of the micro-batches with these FLOPs a rank runs in a round; None in the last one where
    there are too few, never on all ranks.

    The longest first, as many a round as ranks, so that those that wait for each other are of like length; in a round
    the longest goes to the rank with the least `load`, to which it is added (longest processing time first). One rank
    runs them in the order they have.
    """
    n = len(load)
    order = sorted(range(len(flops)), key=lambda i: -flops[i]) if n > 1 else range(len(flops))
    rounds = []
    for begin in range(0, len(order), n):
        turn: list[int | None] = [None] * n
        idle = sorted(range(n), key=lambda rank: load[rank])
        for index, rank in zip(order[begin : begin + n], idle, strict=False):
            turn[rank] = index
            load[rank] += flops[index]
        rounds.append(turn)
    return rounds
