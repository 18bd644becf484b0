"""The data every room shares: problems, traces and their explicit identities. Plain Python and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

SEARCH = 0  # level of the search traces
AGGREGATION = 1  # level of the aggregation traces; of `rollout.levels` the lowest of them, 2, 3, ... above


@dataclass(frozen=True)
class Problem:
    """One problem x of the data set D."""

    id: str  # unique within its data set; credit and records are keyed by it, never by text
    question: str  # what the search prompt shows
    answer: str  # reference answer the reward compares with
    data: dict[str, Any] = field(default_factory=dict)  # what the task's own reward or prompts need


class TraceKey(NamedTuple):
    """Which trace this is. `index` is the request's index, never its order of completion."""

    problem: str  # Problem.id
    level: int  # SEARCH, AGGREGATION, above it 2, 3, ...
    set: int  # index of the level's set below which an aggregation trace hangs; -1 for a search trace
    index: int  # i of y_i among N1 search traces, j of y_j^G among the N2 aggregation traces of one set


@dataclass
class Trace:
    """A sampled token sequence with the log-probability of each sampled token and the policy version."""

    key: TraceKey
    prompt: list[int]  # token ids the trace was conditioned on
    tokens: list[int]  # sampled token ids, the end-of-sequence token included when one was sampled
    logp: np.ndarray  # (len(tokens),) float32, log-prob of each sampled token at the sampling temperature
    finish_reason: str  # "stop": an end-of-sequence id was sampled; "length": cut at max_new_tokens
    policy_version: int
    text: str = ""  # decoded `tokens`, special tokens dropped
    reward: float | None = None  # None: not graded
    verdict: str | None = None  # "correct" | "wrong" | "could_not_grade" | None
    answer: str | None = None  # what the grader extracted; None: not graded, or the completion holds none
    credit: float = 0.0  # after the gate; exactly 0.0 when dead
    gated: bool = False  # the gate set a positive credit to zero

    @property
    def live(self) -> bool:
        return self.credit != 0.0


class Aggregated(NamedTuple):
    """One level above search. Its sets draw from the population: the traces of the level below, set by set."""

    sets: np.ndarray  # (K, n) int64 indices into the population; of several sizes, the smaller sets end in -1
    groups: list[list[Trace]]  # [K][N2]

    @classmethod
    def of(cls, members: list[list[int]], groups: list[list[Trace]]) -> Aggregated:
        """From each set's members."""
        sets = np.full((len(members), max(map(len, members), default=0)), -1, np.int64)
        for row, one in zip(sets, members, strict=True):
            row[: len(one)] = one
        return cls(sets, groups)

    def members(self) -> list[list[int]]:
        """Of each set, without the -1."""
        return [[i for i in row if i >= 0] for row in self.sets.tolist()]

    def population(self) -> list[Trace]:
        """Its traces as the next level's sets index them."""
        return [trace for group in self.groups for trace in group]


@dataclass
class ProblemRollout:
    """Everything sampled for one problem in one round."""

    problem: Problem
    draw: int  # position in the run's order of drawn problems
    search: list[Trace]  # N1 traces (GRPO: the whole group)
    sets: np.ndarray  # (K, n) int64 indices into `search`, see `Aggregated.sets`; (0, 0) without aggregation
    aggregation: list[list[Trace]]  # [K][N2]
    higher: list[Aggregated] = field(default_factory=list)  # levels 2, 3, ...

    @property
    def levels(self) -> list[Aggregated]:
        """Level 1, which is `sets` and `aggregation`, and those above it."""
        return [Aggregated(self.sets, self.aggregation), *self.higher]

    def add_level(self, level: Aggregated) -> None:
        """The next one up."""
        if len(self.sets):
            self.higher.append(level)
        else:
            self.sets, self.aggregation = level

    def traces(self) -> list[Trace]:
        """All traces, search first, then level by level and set by set."""
        return self.search + [trace for level in self.levels for trace in level.population()]

    @property
    def live(self) -> bool:
        return any(trace.live for trace in self.traces())
