"""The running requests, one row each, as arrays: what one decode step reads and writes for all of them at once."""

from __future__ import annotations

import numpy as np
import torch

from spiral_fast.rollout.engine import Request
from spiral_fast.rollout.radix.sampling import uniforms
from spiral_fast.rollout.radix.tree import Node

_FIELDS = ("entry", "seed", "sampled", "limit", "prompt", "temperature", "tokens", "logp")


class Entry:
    """What the engine knows of one queued or running request."""

    __slots__ = ("ticket", "request", "node", "cached", "computed")

    def __init__(self, ticket: int, request: Request):
        self.ticket = ticket
        self.request = request
        self.node: Node | None = None  # end of its prompt in the tree, pinned while it runs
        self.cached = self.computed = 0  # prompt tokens


class Rows:
    """Struct of arrays, first axis R."""

    def __init__(self, entries: list[Entry]):
        requests = [entry.request for entry in entries]
        self.entry = np.array(entries, object)
        self.seed = np.array([request.seed & (2**64 - 1) for request in requests], np.uint64)
        self.sampled = np.zeros(len(entries), np.int64)  # tokens so far
        self.limit = np.array([request.max_new_tokens for request in requests], np.int64)
        self.prompt = np.array([len(request.prompt) for request in requests], np.int64)
        self.temperature = np.array([request.temperature for request in requests], np.float64)
        self.tokens = np.zeros((len(entries), 16), np.int64)  # (R, at least the most sampled)
        self.logp = np.zeros((len(entries), 16), np.float32)

    def __len__(self) -> int:
        return len(self.entry)

    def record(self, tokens: torch.Tensor, logp: torch.Tensor) -> np.ndarray:
        """One sampled token and its log-prob for each row; returns the tokens."""
        tokens, logp = tokens.cpu().numpy(), logp.cpu().numpy()
        if self.sampled.max() >= self.tokens.shape[1]:
            self.tokens, self.logp = (np.pad(x, ((0, 0), (0, x.shape[1]))) for x in (self.tokens, self.logp))
        every = np.arange(len(self))
        self.tokens[every, self.sampled] = tokens
        self.logp[every, self.sampled] = logp
        self.sampled += 1
        return tokens

    def next_uniform(self) -> np.ndarray:
        """(R,) the number in [0, 1) that decides each row's next token."""
        return uniforms(self.seed, self.sampled.astype(np.uint64))

    def last_tokens(self) -> np.ndarray:
        return self.tokens[np.arange(len(self)), self.sampled - 1]

    def select(self, index: np.ndarray) -> None:
        for name in _FIELDS:
            setattr(self, name, getattr(self, name)[index])

    def append(self, other: Rows) -> None:
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for rows in (self, other):
            rows.tokens, rows.logp = (np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (rows.tokens, rows.logp))
        for name in _FIELDS:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))


def fill_holes(alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(source, target) rows: moving the last live rows into the holes makes the live rows the first ones."""
    left = int(alive.sum())
    return left + np.flatnonzero(alive[left:]), np.flatnonzero(~alive[:left])
