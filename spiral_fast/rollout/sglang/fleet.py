"""The servers of an engine: reached, given each policy version and proved to have it, lost and taken back.

All of it runs in the engine's loop, and what touches the learner's weights only while the engine's caller waits for it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spiral_fast.learner.policy_source import Adapter, PolicySource
from spiral_fast.rollout.engine import EngineFailed
from spiral_fast.rollout.sglang import canary
from spiral_fast.rollout.sglang.client import RequestRefused, ServerLost
from spiral_fast.rollout.sglang.connection import Connection
from spiral_fast.rollout.sglang.dispatch import Dispatcher, Server
from spiral_fast.rollout.sglang.server import ServerFailed

FLUSH_AGAIN_S = 0.1  # between two tries to empty a cache that requests still use
OPEN_AGAIN_S = 1.0  # before a lost server is tried again
FAREWELL_S = 3.0  # for what is only a courtesy to the servers when requests are abandoned or the engine is closed


@dataclass(frozen=True)
class Back:
    """A lost server generates again; it does not have the policy yet."""

    server: Server


class Fleet:
    """`emit` gets Back, and EngineFailed when an own server cannot be started again."""

    def __init__(
        self,
        connections: Sequence[Connection],
        source: PolicySource,
        emit: Callable[[Any], None],
        *,
        temperature: float,
        max_running: int,
        timeout_s: float,
        start_timeout_s: float,
        seeded: bool,
        say: Callable[[str], None],
    ):
        self.connections, self._source, self._emit, self._say = connections, source, emit, say
        self._temperature, self._timeout_s, self._start_timeout_s = temperature, timeout_s, start_timeout_s
        self._seeded = seeded
        self.servers = [Server(number, connection.url) for number, connection in enumerate(connections)]
        self.dispatcher = Dispatcher(
            self.servers,
            emit,
            self._on_lost,
            roles=source.roles,
            max_running=max_running,
            stop_token_ids=source.eos_token_ids,
            seeded=seeded,
        )
        self._prefix = f"spiral-{secrets.token_hex(4)}"  # of adapter names: a server may hold those of other runs
        self._loads = 0
        self._adapters: dict[str, Adapter] = {}  # of the present policy, by role
        self._names: dict[int, list[str]] = {server.number: [] for server in self.servers}  # of ours on each server
        self._why: dict[int, str] = {}  # of the servers that are lost
        self._none_up_since: float | None = None
        self._recoveries: set[asyncio.Task] = set()

    async def open(self) -> int:
        """Reach every server and see that it can serve this learner; the longest sequence all can take, tokens."""
        await _all(self._open(server) for server in self.servers)
        longest = []
        for server in self.servers:  # one after the other: a check puts another adapter in place meanwhile
            try:
                await self._prove(server)
                identity = await server.client.identity()
            except ServerLost as error:
                raise EngineFailed(str(error)) from None
            longest.append(min(identity.max_context, identity.cache_tokens or identity.max_context))
        return min(longest)

    async def _open(self, server: Server) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s + self._timeout_s):  # an own server has its own limit
                server.client = await self.connections[server.number].open()
        except (ServerFailed, RequestRefused) as error:
            raise EngineFailed(str(error)) from None
        except TimeoutError:
            raise EngineFailed(
                f"the SGLang server {server.url} does not generate within rollout.sglang.start_timeout_s "
                f"({self._start_timeout_s:g}); start it with `spiral-fast serve`, or mend rollout.servers"
            ) from None
        server.url = server.client.url

    async def _prove(self, server: Server) -> None:
        """That it can serve this learner. Raises EngineFailed, ServerLost."""
        try:
            if self._seeded and not (await server.client.identity()).deterministic:
                raise EngineFailed(
                    f"SGLang server {server.url} honours no seeds, as rollout.sglang.deterministic says it does; start "
                    "it with --enable-deterministic-inference, or set the key to false"
                )
            await canary.check_server(server.client, self._source, self._temperature, name=self._new_name())
        except RequestRefused as error:
            raise EngineFailed(str(error)) from None

    async def update(self) -> None:
        """The learner's present policy on every server that answers."""
        self._adapters = {role: self._source.adapter(role) for role in self._source.roles.names}
        self.dispatcher.emptied()
        up = [server for server in self.servers if server.client]
        for server in self.servers:
            server.up = False
        for server in up:
            if server.number in self._why:
                await self._prove_again(server)
        await _all(self._give(server) for server in up)

    async def admit(self, server: Server) -> None:
        """A lost server that answers again, perhaps as another one: prove it, and give it the present policy."""
        if server.client and not server.up:
            await self._prove_again(server)
            await self._give(server)

    async def _prove_again(self, server: Server) -> None:
        try:
            await self._prove(server)
        except ServerLost as error:
            self._lose(server, error.why)

    async def _give(self, server: Server) -> None:
        """The present policy, each adapter under a new name; it takes requests from then on."""
        if server.client is None:
            return
        client, mine = server.client, self._names[server.number]
        names = {role: self._new_name() for role in self._adapters}
        try:
            for role, name in names.items():
                mine.append(name)
                await client.load_adapter(name, self._adapters[role])
            for role, name in names.items():  # all are there: none has taken another's place
                await canary.check(client, name, self._source, self._temperature, role)
            while len(mine) > len(names):
                with suppress(RequestRefused):  # a server that was started anew does not know it
                    await client.unload_adapter(mine[0])
                del mine[0]
            await self._flush(server)
        except ServerLost as error:
            self._lose(server, error.why)
            return
        except RequestRefused as error:
            raise EngineFailed(str(error)) from None
        server.adapters = names
        if self._why.pop(server.number, None) is not None:
            self._say(f"  the SGLang server {server.url} is back")
        self._none_up_since = None
        self.dispatcher.join(server)

    async def flush(self) -> None:
        """Empty the cache of every server that is up."""
        await self._each(self._flush)
        self.dispatcher.emptied()

    async def _flush(self, server: Server) -> None:
        """Raises EngineFailed for a cache that is in use for longer than timeout_s."""
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                await server.client.flush()
                break
            except RequestRefused as error:  # requests that were abandoned are still on their way out
                if time.monotonic() > end:
                    raise EngineFailed(f"{error}; does another run use this server?") from None
            await asyncio.sleep(FLUSH_AGAIN_S)
        server.emptied()

    async def memory(self, *, released: bool) -> None:
        """Give the memory of the empty caches back, or take it again."""
        await self._each(lambda s: s.client.release_memory() if released else s.client.resume_memory())

    async def _each(self, do: Callable[[Server], Coroutine]) -> None:
        async def one(server: Server) -> None:
            try:
                await do(server)
            except ServerLost as error:
                self._lose(server, error.why)

        await _all(one(server) for server in self.servers if server.up)

    async def abandon(self) -> None:
        """Every request ends, here and on the servers."""
        self.dispatcher.abandon()
        await self._courtesy(lambda server: server.client.abort())

    async def close(self) -> None:
        for task in self._recoveries:
            task.cancel()
        await self.abandon()
        await self._courtesy(self._unload)
        await _all(connection.close() for connection in self.connections)

    async def _unload(self, server: Server) -> None:
        for name in self._names[server.number]:
            await server.client.unload_adapter(name)

    async def _courtesy(self, do: Callable[[Server], Coroutine]) -> None:
        async def one(server: Server) -> None:
            with suppress(ServerLost, RequestRefused, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await do(server)

        await _all(one(server) for server in self.servers if server.client)

    def check_some_up(self) -> None:
        """Raises EngineFailed when no server has been up for start_timeout_s."""
        since = self._none_up_since
        if since is not None and time.monotonic() - since > self._start_timeout_s:
            lost = "; ".join(f"{self.servers[number].url}: {why}" for number, why in self._why.items())
            raise EngineFailed(
                f"no SGLang server for {self._start_timeout_s:g} s (rollout.sglang.start_timeout_s): {lost}"
            )

    def _lose(self, server: Server, why: str) -> None:
        if server.up:
            self.dispatcher.lose(server, why)
        elif server.client:
            self._on_lost(server, why)

    def _on_lost(self, server: Server, why: str) -> None:
        server.client = None
        self._why[server.number] = why
        self._say(f"  the SGLang server {server.url} is lost: {why}")
        if self._none_up_since is None and not any(server.up for server in self.servers):
            self._none_up_since = time.monotonic()
        task = asyncio.ensure_future(self._recover(server))
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def _recover(self, server: Server) -> None:
        await asyncio.sleep(OPEN_AGAIN_S)
        try:
            server.client = await self.connections[server.number].open()
        except (ServerFailed, RequestRefused) as error:
            self._emit(EngineFailed(f"the SGLang server {server.url} was lost ({self._why[server.number]}): {error}"))
            return
        server.url = server.client.url
        self._emit(Back(server))

    def _new_name(self) -> str:
        self._loads += 1
        return f"{self._prefix}-{self._loads}"


async def _all(work: Iterable[Coroutine]) -> None:
    """Together. The first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
