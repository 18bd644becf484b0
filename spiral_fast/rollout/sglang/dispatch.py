"""Which request goes to which server, and when. All of it runs in one asyncio loop.

A server has at most `max_running` requests at a time, so that its own queue stays short: what is first here comes first
there. Problems in order of arrival: the aggregations of an early one come before the searches of later ones. A problem
is placed when its first request can start, and stays on that server. A server keeps the keys and values of each adapter
apart, and so does what is known here of its cache.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spiral_fast.learner.roles import Roles
from spiral_fast.rollout.engine import Request
from spiral_fast.rollout.sglang.client import Client, Generated, RequestRefused, ServerLost
from spiral_fast.rollout.sglang.leaders import Leaders, Prefixes, encode
from spiral_fast.rollout.sglang.placement import Placement

TOO_LONG = re.compile(r"longer than the model's context|exceeds the (maximum allowed length|model's maximum context)")


@dataclass(order=True)
class Group:
    """Requests for the same prompt under the same adapter."""

    rank: tuple[int, int]  # of the problem, of the prompt
    problem: str = field(compare=False)
    role: str = field(compare=False)  # of learner/roles.py
    prompt: bytes = field(compare=False)  # encoded
    requests: list[tuple[int, Request]] = field(compare=False)  # with their tickets


@dataclass(frozen=True)
class Led:
    """A leader has been prefilled."""

    generated: Generated  # no token
    cacheable: int  # of its prompt, tokens that the server need not compute


@dataclass(frozen=True)
class Sampled:
    ticket: int
    generated: Generated
    cacheable: int
    server: int


@dataclass(frozen=True)
class TooLong:
    ticket: int
    why: str  # the server's words


@dataclass(frozen=True)
class Lost:
    """These requests will never finish: all there were of the problems on a server."""

    tickets: list[int]
    server: str
    why: str


class Server:
    """What the dispatcher knows of one."""

    def __init__(self, number: int, url: str):
        self.number, self.url = number, url
        self.client: Client | None = None
        self.up = False  # it has the present policy and takes requests
        self.adapters: dict[str, str] = {}  # role -> name under which its requests are sent
        self.waiting: list[Group] = []  # heap: of the problems that are on this server
        self.awaiting: list[Group] = []  # admitted, but what it shares may still be in flight
        self.running = 0  # requests, those of groups whose leader is in flight included
        self.tasks: set[asyncio.Task] = set()
        self.emptied()

    def emptied(self) -> None:
        """Its cache is empty now."""
        self.leaders: dict[str, Leaders] = defaultdict(Leaders)  # by role
        self.prefilled: dict[tuple[str, bytes], asyncio.Event] = {}  # (role, prompt); set when it is

    def drop(self) -> None:
        """What waits and runs; connections that close end it on the server too, within seconds."""
        for task in self.tasks - {asyncio.current_task()}:
            task.cancel()
        self.waiting, self.awaiting, self.running = [], [], 0
        self.emptied()


class Dispatcher:
    """`emit` gets Led, Sampled, TooLong, Lost, and every exception that says none of these; `on_lost` each server that
    was lost, after its requests were given up."""

    def __init__(
        self,
        servers: Sequence[Server],
        emit: Callable[[Any], None],
        on_lost: Callable[[Server, str], None],
        *,
        roles: Roles,
        max_running: int,
        stop_token_ids: frozenset[int],
        seeded: bool,
    ):
        self.servers = servers
        self._roles = roles
        self._emit, self._on_lost = emit, on_lost
        self._max_running, self._stop_token_ids, self._seeded = max_running, stop_token_ids, seeded
        self.emptied()
        self._reset()

    def emptied(self) -> None:
        """All caches are empty: it no longer matters on which server a problem was. Nothing is pending."""
        self._placement = Placement(len(self.servers))

    def _reset(self) -> None:
        self._ranks: dict[str, int] = {}  # of problems, by their first request since all was idle
        self._prompts = 0  # groups since then
        self._unplaced: dict[str, list[Group]] = {}  # by problem
        self._waiting: dict[str, Prefixes] = defaultdict(Prefixes)  # by role, of groups of which nothing was sent yet
        self._pending: dict[int, str] = {}  # ticket -> problem

    def add(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Requests with one prompt and adapter that come together are siblings."""
        if not self._pending:
            self._reset()
        groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        for ticket, request in requests:
            problem, role, prompt = siblings = request.key.problem, self._roles.of(request.key.level), request.prompt
            if siblings not in groups:
                self._prompts += 1
                rank = self._ranks.setdefault(problem, len(self._ranks)), self._prompts
                groups[siblings] = Group(rank, problem, role, encode(prompt), [])
            groups[siblings].requests.append((ticket, request))
            self._pending[ticket] = problem
        for group in groups.values():
            self._waiting[group.role].add(group.prompt)
            number = self._placement.server_of(group.problem)
            if number is None:
                self._unplaced.setdefault(group.problem, []).append(group)
            else:
                heapq.heappush(self.servers[number].waiting, group)
        self.admit()

    def join(self, server: Server) -> None:
        """It has the present policy and takes requests."""
        self._placement.join(server.number, [other.number for other in self.servers if other.up])
        server.up = True
        self.admit()

    def admit(self) -> None:
        """Start what can start."""
        while group := self._next():
            server = self.servers[self._placement.server_of(group.problem)]
            server.awaiting.append(group)
            for _, request in group.requests:
                self._placement.start(group.problem, len(request.prompt), request.max_new_tokens)
            server.running += len(group.requests)
            self._begin(server, self._run(server, group))

    def abandon(self) -> None:
        for server in self.servers:
            server.drop()
        self.emptied()
        self._reset()

    def lose(self, server: Server, why: str) -> None:
        """Give up what is on a server."""
        if not server.up:
            return
        server.up = False
        problems = set(self._placement.lose(server.number))
        for group in server.waiting + server.awaiting:
            self._waiting[group.role].remove(group.prompt)
        server.drop()
        tickets = [ticket for ticket, problem in self._pending.items() if problem in problems]
        for ticket in tickets:
            del self._pending[ticket]
        if tickets:
            self._emit(Lost(tickets, server.url, why))
        self._on_lost(server, why)

    def _next(self) -> Group | None:
        """The first group that may start, its problem placed."""
        free = [server for server in self.servers if server.up and server.running < self._max_running]
        problem = min(self._unplaced, key=self._ranks.__getitem__, default=None)
        if problem is not None and all(self._ranks[problem] < group.rank[0] for s in free for group in s.waiting[:1]):
            up = [server.number for server in self.servers if server.up]
            number = self._placement.place(problem, [server.number for server in free], up)
            if number is not None:
                for group in self._unplaced.pop(problem):
                    heapq.heappush(self.servers[number].waiting, group)
        first = min((server for server in free if server.waiting), key=lambda s: s.waiting[0], default=None)
        return heapq.heappop(first.waiting) if first else None

    def _begin(self, server: Server, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        server.tasks.add(task)
        task.add_done_callback(lambda task: self._ended(server, task))

    def _ended(self, server: Server, task: asyncio.Task) -> None:
        server.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServerLost):
            self.lose(server, error.why)
        elif error is not None:
            self._emit(error)

    async def _run(self, server: Server, group: Group) -> None:
        """The leader of a group, where it has one, then its requests."""
        leaders, waiting, prompt = server.leaders[group.role], self._waiting[group.role], group.prompt
        while other := leaders.waits_for(prompt):
            await server.prefilled[group.role, other].wait()
        server.awaiting.remove(group)
        waiting.remove(prompt)
        ticket, request = group.requests[0]
        there = leaders.there(prompt)
        is_shared = len(group.requests) > 1 or waiting.nearest(prompt)[0] > there
        if is_shared and there < len(request.prompt) - 1:
            leaders.start(prompt)
            done = server.prefilled[group.role, prompt] = asyncio.Event()
            generated = await self._ask(server, ticket, request, 0)
            if generated is None:
                return
            leaders.finish(prompt)
            done.set()
            self._emit(Led(generated, there))
        for ticket, request in group.requests:
            self._begin(server, self._sample(server, group, ticket, request))

    async def _sample(self, server: Server, group: Group, ticket: int, request: Request) -> None:
        leaders = server.leaders[group.role]
        cacheable = leaders.there(group.prompt)
        generated = await self._ask(server, ticket, request, request.max_new_tokens)
        if generated is None:
            return
        if cacheable < len(request.prompt) - 1:
            leaders.prefilled(group.prompt)
        server.running -= 1
        self._placement.finish(group.problem, request.max_new_tokens, len(generated.tokens))
        del self._pending[ticket]
        self._emit(Sampled(ticket, generated, cacheable, server.number))
        self.admit()

    async def _ask(self, server: Server, ticket: int, request: Request, max_new_tokens: int) -> Generated | None:
        """None: the prompt is too long for the server, and was reported."""
        try:
            generated = await server.client.generate(
                request.prompt,
                adapter=server.adapters[self._roles.of(request.key.level)],
                max_new_tokens=max_new_tokens,
                temperature=request.temperature,
                stop_token_ids=self._stop_token_ids,
                seed=request.seed if self._seeded else None,
            )
        except RequestRefused as error:
            if not TOO_LONG.search(error.why):  # it has lost the adapter, for example, since it was started anew
                raise ServerLost(server.url, f"it refused a request: {error.why}") from None
            self._emit(TooLong(ticket, error.why))
            return None
        if generated.finish_reason == "length" and len(generated.tokens) < max_new_tokens:
            self._emit(TooLong(ticket, f"it stopped after {len(generated.tokens)} tokens"))
            return None
        return generated
