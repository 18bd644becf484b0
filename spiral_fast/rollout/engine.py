"""The contract every rollout engine keeps. Token ids in, token ids out; nothing is truncated."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np

from spiral_fast.trace import TraceKey


@dataclass(frozen=True)
class Request:
    key: TraceKey
    prompt: tuple[int, ...]
    max_new_tokens: int  # L_max
    temperature: float
    seed: int  # from `request_seed`; the random stream depends on nothing else


@dataclass(frozen=True)
class Completion:
    tokens: list[int]  # sampled ids, the end-of-sequence id included when one was sampled
    logp: np.ndarray  # (len(tokens),) float32 log-prob of each sampled token at the sampling temperature
    finish_reason: str  # "stop" | "length"
    policy_version: int
    prompt_tokens: int
    cached_tokens: int  # of prompt_tokens, served from the cache
    computed_tokens: int  # of prompt_tokens, run through the model for this request


@dataclass
class TokenCounts:
    """Tokens since the engine started (or since `engine.counts` was last replaced): prompt = cached + computed."""

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    generated: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return type(self)(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Engine(Protocol):
    name: str
    per_request_seed: bool  # same seed and prompt give the same trace whatever else is in the batch (up to rounding)
    bitwise_resume: bool  # the same calls in the same order give the same bits in a new process
    asked_by: int | None  # of several ranks; None: each has an engine of its own; 1: rank 0 asks for all
    max_context: int  # tokens; prompt + max_new_tokens above it raises PromptTooLong
    counts: TokenCounts

    def add(self, request: Request) -> int:
        """Queue one request; returns its ticket. Raises PromptTooLong naming problem, set and both lengths."""

    def step(self) -> list[tuple[int, Completion]]:
        """Work until at least one request finishes (or nothing is queued: then []). (ticket, completion) pairs.

        Raises NonFiniteLogits naming problems and policy version when the model has diverged; nothing is queued or
        running then. Raises RequestsLost for requests that will never finish, while others go on; EngineFailed when
        none can.
        """

    def set_policy(self, version: int) -> None:
        """From now on the weights are those of `version`; no keys or values of an older version are read again.

        Raises RuntimeError while requests are queued or running. That the engine really has the learner's weights shows
        in `logp_gap/*` of the next step's metrics; the embedded engine also notices weights changed without this call.
        """

    def abandon(self) -> None:
        """Forget every queued and running request; their tickets never finish. What was computed stays counted."""

    def close(self) -> None: ...


class PromptTooLong(ValueError):
    def __init__(self, request: Request, max_context: int, server: str = ""):
        """server: the words of a server that refused the request itself."""
        key = request.key
        where = f"problem {key.problem!r}" + (f", set {key.set}" if key.set >= 0 else "")
        super().__init__(
            f"{where}: a prompt of {len(request.prompt)} tokens + max_new_tokens {request.max_new_tokens} exceeds "
            + (f"what the server can take ({server})" if server else f"the context of {max_context} tokens")
            + "; raise the context, or lower rollout.search_max_new_tokens"
        )


class EngineFailed(RuntimeError):
    """The engine cannot go on. A run stops; what it has saved is whole, so that it can be resumed."""


class RequestsLost(RuntimeError):
    """A server died or fell silent: these requests will never finish; the engine goes on without it.

    They are all the pending requests of the problems concerned. Such a problem is drawn again as a whole: to keep the
    traces that had finished and draw only the others anew would favour short ones.
    """

    def __init__(self, tickets: Iterable[int], server: str, why: str):
        self.tickets, self.server, self.why = list(tickets), server, why
        super().__init__(f"the server {server} was lost with {len(self.tickets)} requests: {why}")


MOST_LOSSES = 3  # of one problem


class Losses:
    """How often each problem had to be drawn again."""

    def __init__(self) -> None:
        self._times: Counter = Counter()

    def add(self, problems: Iterable[str], error: RequestsLost) -> None:
        """Once more. Raises EngineFailed when that is too often for one of them."""
        for problem in dict.fromkeys(problems):
            self._times[problem] += 1
            if self._times[problem] > MOST_LOSSES:
                raise EngineFailed(
                    f"problem {problem!r}: its requests were lost {self._times[problem]} times, last by the server "
                    f"{error.server}: {error.why}"
                ) from error


class NonFiniteLogits(FloatingPointError):
    problems: list[str]  # ids of the problems whose requests had such logits, each once

    def __init__(self, requests: Iterable[Request], policy_version: int):
        self.problems = list(dict.fromkeys(request.key.problem for request in requests))
        others = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        super().__init__(
            f"problem {self.problems[0]!r}{others}: the model's logits are not finite under policy version "
            f"{policy_version}: its weights have diverged; lower learner.learning_rate"
        )


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """Run all requests; completions in the order of the requests. Lost problems are drawn again."""
    requests = list(requests)
    waiting = {engine.add(request): i for i, request in enumerate(requests)}  # by ticket
    done: list[Completion | None] = [None] * len(requests)
    losses = Losses()
    while waiting:
        try:
            for ticket, completion in engine.step():
                done[waiting.pop(ticket)] = completion
        except RequestsLost as error:
            lost = {requests[waiting.pop(ticket)].key.problem for ticket in error.tickets}
            losses.add(lost, error)
            again = [i for i, request in enumerate(requests) if request.key.problem in lost]
            waiting |= {engine.add(requests[i]): i for i in again}
    return done


def request_seed(run_seed: int, occasion: int, key: TraceKey) -> int:
    """A 63-bit seed from (run seed, occasion, problem, level, set, index): siblings differ, a resumed run repeats.

    `occasion` tells apart the times one problem is sampled: the draw number in training, the step of an evaluation.
    """
    text = f"{run_seed}/{occasion}/{key.problem}/{key.level}/{key.set}/{key.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
