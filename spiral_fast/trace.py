"""The data every room shares: problems, traces and their explicit identities. Plain Python and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

SEARCH = 0  # level of the search traces
AGGREGATION = 1  # level of the aggregation traces


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
    level: int  # SEARCH or AGGREGATION
    set: int  # index of the set below which an aggregation trace hangs; -1 for a search trace
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


@dataclass
class ProblemRollout:
    """Everything sampled for one problem in one round."""

    problem: Problem
    draw: int  # position in the run's order of drawn problems
    search: list[Trace]  # N1 traces (GRPO: the whole group)
    sets: np.ndarray  # (K, n) int64 indices into `search`; (0, 0) without aggregation
    aggregation: list[list[Trace]]  # [K][N2]

    def traces(self) -> list[Trace]:
        """All traces, search first, then aggregation by set."""
        return self.search + [trace for group in self.aggregation for trace in group]

    @property
    def live(self) -> bool:
        return any(trace.live for trace in self.traces())
