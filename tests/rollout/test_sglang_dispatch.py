"""Who is asked for what, with servers that answer at once and say who they are. Real ones: tests/sglang."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spiral_fast.learner.roles import Roles
from spiral_fast.rollout.engine import Request
from spiral_fast.rollout.sglang.client import Generated
from spiral_fast.rollout.sglang.dispatch import Dispatcher, Sampled, Server
from spiral_fast.trace import AGGREGATION, SEARCH, TraceKey


class Echo:
    """Samples token 1, once; `asked` for (adapter, prompt, max_new_tokens)."""

    def __init__(self):
        self.asked = []

    async def generate(self, prompt, *, adapter, max_new_tokens, **_):
        self.asked.append((adapter, tuple(prompt), max_new_tokens))
        tokens = [1] if max_new_tokens else []
        return Generated(tokens, np.zeros(len(tokens), np.float32), "stop", len(prompt), 0)


def places(dispatcher: Dispatcher, events: list, problems: list[str], prompt: tuple[int, ...]) -> dict[str, int]:
    """One request for each problem, run to the end: the server that each was on."""

    async def run() -> None:
        dispatcher.add(
            (i, Request(TraceKey(name, 0, -1, 0), (i, *prompt), 4, 1.0, 0)) for i, name in enumerate(problems)
        )
        while len(events) < len(problems):
            await asyncio.sleep(0)

    events.clear()
    asyncio.run(run())
    return {problems[event.ticket]: event.server for event in events}


@pytest.fixture
def dispatcher():
    servers = [Server(number, f"http://{number}") for number in range(3)]
    events: list = []

    def emit(event) -> None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Sampled):
            events.append(event)

    settings = dict(max_running=2, stop_token_ids=frozenset({1}), seeded=False)
    made = Dispatcher(servers, emit, lambda *_: None, roles=Roles(["search", "aggregation"]), **settings)
    made.events = events
    for server in servers:
        server.client, server.up = Echo(), True
        server.adapters = {"search": "theta", "aggregation": "phi"}
    return made


def test_a_problem_stays_on_its_server_also_after_all_was_idle(dispatcher):
    """Its searches may all be done before its aggregations are asked for, and its cache is where they were."""
    problems = [f"p{i}" for i in range(12)]
    first = places(dispatcher, dispatcher.events, problems, (2, 3))
    assert sorted(first.values()) == [0] * 4 + [1] * 4 + [2] * 4
    again = places(dispatcher, dispatcher.events, [problems[i] for i in (11, 3, 7, 0)], (2, 3, 4))
    assert again == {name: first[name] for name in again}


def test_it_may_be_on_another_once_the_caches_are_empty(dispatcher):
    first = places(dispatcher, dispatcher.events, ["a", "b", "c"], (2,))
    dispatcher.emptied()
    assert places(dispatcher, dispatcher.events, ["c", "b", "a"], (2,)) == dict(
        zip(["c", "b", "a"], first.values(), strict=True)
    )


def test_two_adapters_share_no_prompt(dispatcher):
    """A level's adapter gets its requests and a leader of its own: what the other has in the cache is of no use."""
    prompt = (2, 3, 4, 5)
    keys = [TraceKey("p", level, level - 1, i) for level in (SEARCH, AGGREGATION) for i in range(2)]

    async def run() -> None:
        dispatcher.add((i, Request(key, prompt, 4, 1.0, 0)) for i, key in enumerate(keys))
        while len(dispatcher.events) < len(keys):
            await asyncio.sleep(0)

    asyncio.run(run())
    (asked,) = [server.client.asked for server in dispatcher.servers if server.client.asked]
    expected = [(adapter, prompt, n) for adapter in ("theta", "phi") for n in (0, 4, 4)]
    assert sorted(asked) == sorted(expected)
    assert {event.cacheable for event in dispatcher.events} == {len(prompt) - 1}  # after its own leader
