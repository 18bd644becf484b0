"""Rollouts by SGLang servers: one that the run starts for itself, or any number by URL.

The learner's adapter (or both) goes to each server under a new name per policy version, every request carries the name
of the one that serves its level, and a version is in place only when a canary's log-probs through each equal the
learner's. A thread of its own talks to the servers (fleet.py) and hands the requests out (dispatch.py); what touches
the learner's weights there happens only while the caller waits in `set_policy` or `step`.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spiral_fast.interrupts import result_of
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import (
    Completion,
    NonFiniteLogits,
    PromptTooLong,
    Request,
    RequestsLost,
)
from spiral_fast.rollout.sglang.background import Background
from spiral_fast.rollout.sglang.client import Generated
from spiral_fast.rollout.sglang.connection import Connection
from spiral_fast.rollout.sglang.counts import SglangCounts
from spiral_fast.rollout.sglang.dispatch import Led, Lost, Sampled, TooLong
from spiral_fast.rollout.sglang.fleet import Back, Fleet
from spiral_fast.rollout.sglang.server import SPARE_TOKENS

T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """A line for whoever runs the engine, in the thread of the caller: to print may raise what would end the other."""

    text: str


class SglangEngine:
    """See `rollout/engine.py` for the contract. Nothing is started or asked before the first `set_policy` or `step`."""

    name = "sglang"
    bitwise_resume = False
    asked_by = 1  # the servers are everybody's, and whoever loads an adapter must know what they hold

    def __init__(
        self,
        connect: Callable[[Path], list[Connection]],
        source: PolicySource,
        *,
        temperature: float,
        max_running: int,
        timeout_s: float,
        start_timeout_s: float,
        deterministic: bool = False,
        shares_gpu: bool = False,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        """connect: the servers, given a folder for their logs and adapters; source: the learner's policy; temperature:
        of the canary; max_running: requests a server has at a time; timeout_s, start_timeout_s: see rollout.sglang;
        deterministic: servers honour seeds; shares_gpu: servers give their memory back between rollouts; folder: the
        one for `connect`, None = a temporary one; say: is told of servers that are lost and back."""
        self.per_request_seed = deterministic
        self.max_context = source.max_context
        self.counts = SglangCounts()
        self._connect, self._source, self._folder = connect, source, folder
        self._settings = dict(
            temperature=temperature,
            max_running=max_running,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            seeded=deterministic,
            say=lambda text: self._events.put(Said(text)),
        )
        self._say = say
        self._shares_gpu, self._released = shares_gpu, False
        self._version: int | None = None
        self._next_ticket = 0
        self._pending: dict[int, Request] = {}
        self._added: list[tuple[int, Request]] = []  # not yet handed out
        self._events: queue.SimpleQueue = queue.SimpleQueue()  # from the other thread
        self._next: deque = deque()  # of them, put back
        self._per_server: dict[int, int] = defaultdict(int)  # tokens since the engine was idle
        self._background: Background | None = None

    def add(self, request: Request) -> int:
        """Queue one request; returns its ticket. Raises PromptTooLong, or ValueError for one that can never run."""
        n, vocabulary = len(request.prompt), self._source.vocabulary
        if n + request.max_new_tokens > self.max_context:
            raise PromptTooLong(request, self.max_context)
        if not n or request.max_new_tokens < 1 or not request.temperature > 0:
            raise ValueError(
                f"problem {request.key.problem!r}: needs a prompt, max_new_tokens >= 1 and temperature > 0; got {n} "
                f"tokens, {request.max_new_tokens}, {request.temperature}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            raise ValueError(
                f"problem {request.key.problem!r}: prompt ids must be in 0..{vocabulary - 1}, found "
                f"{min(request.prompt)}..{max(request.prompt)}"
            )
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = request
        self._added.append((ticket, request))
        return ticket

    def step(self) -> list[tuple[int, Completion]]:
        """Wait until a request finishes; [] when nothing is pending.

        Raises RequestsLost. Whatever else is raised drops everything pending: PromptTooLong in a server's own words,
        NonFiniteLogits, EngineFailed, CanaryFailed of a server that came back.
        """
        if not self._pending:
            return []
        try:
            if self._version is None:
                self.set_policy(0)
            if self._released:
                self._memory(released=False)
            self._background.call(self._fleet.dispatcher.add, self._added)
            self._added = []
            finished: list[tuple[int, Completion]] = []
            while not finished:
                event = self._event()
                while event is not None:
                    if finished and not isinstance(event, Led | Sampled):
                        self._next.append(event)  # what it raises comes after what has finished
                        break
                    finished += self._handle(event)
                    event = self._event(wait=False)
        except RequestsLost:
            raise
        except BaseException:
            self.abandon()
            raise
        if not self._pending:
            self.counts.busiest_server += max(self._per_server.values())
            self._per_server.clear()
        return finished

    def set_policy(self, version: int) -> None:
        """The policy is the learner's present one. If its version is another than before, its adapter goes to every
        server that answers and is proved there, and the old one goes; else only the caches are emptied.

        Raises RuntimeError while requests are pending, CanaryFailed, and EngineFailed for servers that cannot be
        reached at first or cannot serve this learner. One that is lost here is given the policy when it is back.
        """
        if self._version is not None and self._pending:
            raise RuntimeError(
                f"set_policy({version}) with {len(self._pending)} requests queued or running; finish them first"
            )
        if self._background is None:
            self._start()
        if version == self._version:
            self._wait(self._fleet.flush())
            if self._shares_gpu and not self._released:
                self._memory(released=True)
            return
        if self._released:
            self._memory(released=False)
        self._wait(self._fleet.update())
        self._version = version

    def abandon(self) -> None:
        """Forget every queued and running request, also on the servers."""
        self._pending, self._added = {}, []
        self._per_server.clear()
        if self._background:
            self._wait(self._fleet.abandon())

    def close(self) -> None:
        """No process, thread or adapter of this engine is left."""
        self._pending, self._added = {}, []
        if self._background is None:
            return
        background, self._background = self._background, None
        try:
            result_of(background.begin(self._fleet.close()))
        finally:
            background.close()
            if self._folder is None:
                shutil.rmtree(self._used_folder, ignore_errors=True)

    def _start(self) -> None:
        self._used_folder = self._folder or Path(tempfile.mkdtemp(prefix="spiral-fast-"))
        self._background = Background()
        self._fleet = Fleet(self._connect(self._used_folder), self._source, self._events.put, **self._settings)
        longest = self._wait(self._fleet.open()) - SPARE_TOKENS
        self.max_context = min(self.max_context, longest)
        for request in self._pending.values():
            if len(request.prompt) + request.max_new_tokens > longest:
                raise PromptTooLong(request, longest)

    def _memory(self, *, released: bool) -> None:
        self._wait(self._fleet.memory(released=released))
        self._released = released

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._background.begin(work)
        try:
            return result_of(future)
        except BaseException:
            future.cancel()
            raise

    def _event(self, *, wait: bool = True) -> Any:
        """The next from the other thread; None where there is none and `wait` is false."""
        if self._next:
            return self._next.popleft()
        while True:
            try:
                return self._events.get(timeout=1.0) if wait else self._events.get_nowait()
            except queue.Empty:
                if not wait:
                    return None
                self._fleet.check_some_up()

    def _handle(self, event: Any) -> list[tuple[int, Completion]]:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Said):
            self._say(event.text)
        elif isinstance(event, Back):
            self._wait(self._fleet.admit(event.server))
        elif isinstance(event, Led):
            self._count(event.generated, event.cacheable)
            self.counts.leaders += event.generated.prompt_tokens
            self.counts.cached -= event.generated.prompt_tokens
        elif isinstance(event, Lost):
            problems = {self._pending[ticket].key.problem for ticket in event.tickets if ticket in self._pending}
            tickets = [ticket for ticket, request in self._pending.items() if request.key.problem in problems]
            for ticket in tickets:
                del self._pending[ticket]
            self._added = [(ticket, request) for ticket, request in self._added if ticket in self._pending]
            if tickets:
                raise RequestsLost(tickets, event.server, event.why)
        elif event.ticket in self._pending:  # else it was abandoned
            request = self._pending.pop(event.ticket)
            if isinstance(event, TooLong):
                raise PromptTooLong(request, self.max_context, event.why)
            return [(event.ticket, self._complete(request, event))]
        return []

    def _complete(self, request: Request, event: Sampled) -> Completion:
        done = event.generated
        if not np.isfinite(done.logp).all():
            raise NonFiniteLogits([request], self._version)
        self._count(done, event.cacheable)
        self.counts.prompt += done.prompt_tokens
        self.counts.generated += len(done.tokens)
        self._per_server[event.server] += done.prompt_tokens + len(done.tokens)
        return Completion(
            tokens=done.tokens,
            logp=done.logp,
            finish_reason=done.finish_reason,
            policy_version=self._version,
            prompt_tokens=done.prompt_tokens,
            cached_tokens=done.cached_tokens,
            computed_tokens=done.prompt_tokens - done.cached_tokens,
        )

    def _count(self, done: Generated, cacheable: int) -> None:
        self.counts.computed += done.prompt_tokens - done.cached_tokens
        self.counts.cached += done.cached_tokens
        self.counts.hits += done.cached_tokens
        self.counts.cacheable += cacheable
