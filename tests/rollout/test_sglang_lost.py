"""A server that is lost and not back: what the engine's caller sees, in which thread. Real servers are lost in
tests/sglang and tests/faults; this one never was one."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from spiral_fast.learner.roles import Roles
from spiral_fast.rollout.engine import EngineFailed, Request, RequestsLost
from spiral_fast.rollout.sglang import canary
from spiral_fast.rollout.sglang.client import ServerLost
from spiral_fast.rollout.sglang.engine import SglangEngine
from spiral_fast.trace import TraceKey

URL = "http://127.0.0.1:1"


class Silent:
    """Takes every adapter and never answers a request."""

    url = URL

    async def identity(self):
        return SimpleNamespace(max_context=100, cache_tokens=None)

    async def generate(self, *_, **__):
        raise ServerLost(URL, "no answer")

    async def nothing(self, *_):
        return None

    load_adapter = unload_adapter = flush = abort = nothing


class Once:
    """Reached once, never again."""

    url = URL
    opened = False

    async def open(self) -> Silent:
        if self.opened:
            await asyncio.Event().wait()
        self.opened = True
        return Silent()

    async def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch):
    async def right(*_, **__):
        return 0.0

    monkeypatch.setattr(canary, "check_server", right)
    monkeypatch.setattr(canary, "check", right)
    source = SimpleNamespace(
        max_context=100,
        vocabulary=50,
        eos_token_ids=frozenset({1}),
        roles=Roles(["default"]),
        adapter=lambda role: None,
    )
    said: list[tuple[str, threading.Thread]] = []

    def make(say=lambda text: said.append((text, threading.current_thread()))) -> SglangEngine:
        made.append(
            SglangEngine(
                lambda folder: [Once()],
                source,
                temperature=1.0,
                max_running=4,
                timeout_s=5.0,
                start_timeout_s=0.5,
                say=say,
            )
        )
        return made[0]

    made: list[SglangEngine] = []
    make.said = said
    yield make
    made[0].close()


def request(i: int) -> Request:
    return Request(TraceKey("p", 0, -1, i), (2, 3, 4), 5, 1.0, i)


def test_requests_are_lost_and_then_the_engine_fails(engine):
    made = engine()
    tickets = [made.add(request(i)) for i in range(6)]  # more than run at a time
    with pytest.raises(RequestsLost, match="lost with 6 requests: no answer") as lost:
        made.step()
    assert lost.value.tickets == tickets
    made.add(request(0))
    with pytest.raises(EngineFailed, match=rf"no SGLang server for 0.5 s .*: {URL}: no answer"):
        made.step()
    assert engine.said == [(f"  the SGLang server {URL} is lost: no answer", threading.main_thread())]


def test_output_that_goes_nowhere_ends_the_caller_and_not_the_thread_behind_it(engine):
    """As rich does when the pipe is closed."""

    def closed(text: str) -> None:
        raise SystemExit(1)

    made = engine(closed)
    made.add(request(0))
    with pytest.raises(RequestsLost):
        made.step()
    made.add(request(0))
    with pytest.raises(SystemExit):
        made.step()
    made.close()  # returns
    assert "sglang" not in {thread.name for thread in threading.enumerate()}
