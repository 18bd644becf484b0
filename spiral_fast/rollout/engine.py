"""The contract every rollout engine keeps. Token ids in, token ids out; nothing is truncated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
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

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prompt - other.prompt,
            self.cached - other.cached,
            self.computed - other.computed,
            self.generated - other.generated,
        )


class Engine(Protocol):
    name: str
    per_request_seed: bool  # same seed and prompt give the same trace whatever else is in the batch (up to rounding)
    bitwise_resume: bool  # the same calls in the same order give the same bits in a new process
    max_context: int  # tokens; prompt + max_new_tokens above it raises PromptTooLong
    counts: TokenCounts

    def add(self, request: Request) -> int:
        """Queue one request; returns its ticket. Raises PromptTooLong naming problem, set and both lengths."""

    def step(self) -> list[tuple[int, Completion]]:
        """Work until at least one request finishes (or nothing is queued: then []). (ticket, completion) pairs.

        Raises NonFiniteLogits naming problems and policy version when the model has diverged; nothing is queued or
        running then.
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
    def __init__(self, request: Request, max_context: int):
        key = request.key
        where = f"problem {key.problem!r}" + (f", set {key.set}" if key.set >= 0 else "")
        super().__init__(
            f"{where}: a prompt of {len(request.prompt)} tokens + max_new_tokens {request.max_new_tokens} exceeds the "
            f"context of {max_context} tokens; raise the context, or lower rollout.search_max_new_tokens"
        )


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
    """Run all requests; completions in the order of the requests."""
    tickets = [engine.add(request) for request in requests]
    done: dict[int, Completion] = {}
    while len(done) < len(tickets):
        done.update(engine.step())
    return [done[ticket] for ticket in tickets]


def request_seed(run_seed: int, occasion: int, key: TraceKey) -> int:
    """A 63-bit seed from (run seed, occasion, problem, level, set, index): siblings differ, a resumed run repeats.

    `occasion` tells apart the times one problem is sampled: the draw number in training, the step of an evaluation.
    """
    text = f"{run_seed}/{occasion}/{key.problem}/{key.level}/{key.set}/{key.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
