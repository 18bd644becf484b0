"""The embedded engine as an engine on servers that die: it loses requests when the test says so."""

from __future__ import annotations

from collections.abc import Callable

from spiral_fast.rollout.engine import RequestsLost


class LosingEngine:
    """Of `engine`; after each step, `loses(step, pending)` names the problems whose requests are lost."""

    def __init__(self, engine, loses: Callable[[int, set[str]], set[str]]):
        self.engine, self.loses = engine, loses
        self.pending: dict[int, str] = {}  # ticket -> problem
        self.steps = 0

    def add(self, request) -> int:
        ticket = self.engine.add(request)
        self.pending[ticket] = request.key.problem
        return ticket

    def step(self):
        self.steps += 1
        lost = self.loses(self.steps, set(self.pending.values()))
        tickets = [ticket for ticket, problem in self.pending.items() if problem in lost]
        if tickets:
            for ticket in tickets:
                del self.pending[ticket]
            raise RequestsLost(tickets, "http://there", "it was killed")
        finished = []
        while not finished:
            finished = [(ticket, done) for ticket, done in self.engine.step() if ticket in self.pending]
        for ticket, _ in finished:
            del self.pending[ticket]
        return finished
