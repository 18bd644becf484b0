"""A task whose every number can be computed by hand: guess the largest digit of a problem.

Problem d: a search trace guesses a digit 0 .. d by its seed; an aggregation trace says its candidates' largest digit.
The engine keeps the whole contract of `rollout/engine.py`; it finishes requests in reverse order, in batches of 3.
"""

from __future__ import annotations

import numpy as np

from spiral_fast.rollout.engine import Completion, PromptTooLong, Request, TokenCounts
from spiral_fast.trace import Problem

EOS, SEARCH_ROLE, AGGREGATION_ROLE, SILENT = 10, 11, 12, 13  # token ids; 0 .. 9 are the digits


def make_problem(digit: int, id: str = "") -> Problem:
    return Problem(id or f"d{digit}", f"the largest digit up to {digit}", str(digit))


class MaxPrompts:
    """`[d, search role]` and `[d, candidate digits ..., aggregation role]`; a completion shows its digit in a box."""

    def search(self, problem: Problem) -> list[int]:
        return [int(problem.answer), SEARCH_ROLE]

    def aggregation(self, problem: Problem, candidates: list[list[int]]) -> list[int]:
        return [int(problem.answer), *(tokens[0] for tokens in candidates), AGGREGATION_ROLE]

    def decode(self, tokens: list[int]) -> str:
        return "no idea" if tokens[0] == SILENT else rf"\boxed{{{tokens[0]}}}"


def guess(digit: int, seed: int) -> int:
    """Of a search trace: SILENT in one of 8 cases, else any of 0 .. digit."""
    return SILENT if seed % 8 == 0 else seed % (digit + 1)


class MaxEngine:
    name = "max"
    per_request_seed = True
    bitwise_resume = True
    asked_by = None

    def __init__(self, max_context: int = 64):
        self.max_context = max_context
        self.counts = TokenCounts()
        self.requests: list[Request] = []  # all requests ever added, by ticket
        self._queue: list[int] = []

    def add(self, request: Request) -> int:
        if len(request.prompt) + request.max_new_tokens > self.max_context:
            raise PromptTooLong(request, self.max_context)
        self.requests.append(request)
        self._queue.append(len(self.requests) - 1)
        return len(self.requests) - 1

    def step(self) -> list[tuple[int, Completion]]:
        finished, self._queue = self._queue[-3:][::-1], self._queue[:-3]
        return [(ticket, self._complete(self.requests[ticket])) for ticket in finished]

    def _complete(self, request: Request) -> Completion:
        digit, *quoted, role = request.prompt
        if role == SEARCH_ROLE:
            answer = guess(digit, request.seed)
        else:
            answer = max((q for q in quoted if q != SILENT), default=SILENT)
        tokens = [answer, EOS][: request.max_new_tokens]
        self.counts.prompt += len(request.prompt)
        self.counts.computed += len(request.prompt)
        self.counts.generated += len(tokens)
        logp = np.full(len(tokens), -0.5, np.float32)
        reason = "stop" if tokens[-1] == EOS else "length"
        return Completion(tokens, logp, reason, 0, len(request.prompt), 0, len(request.prompt))

    def set_policy(self, version: int) -> None: ...

    def close(self) -> None: ...
