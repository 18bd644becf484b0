"""Problems on servers: each on one, tokens even."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_fast.rollout.sglang.placement import Placement


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("together", [8, 1000])
@pytest.mark.parametrize("faster", [1, 3])
def test_load_is_even_within_a_tenth_at_64_problems_per_server(servers, seed, together, faster):
    """24 traces a problem, of lengths nobody knows before, hard problems with longer ones; each server has `together`
    problems at a time, and the first one is that many times faster."""
    chance = random.Random(seed)
    placement, real = Placement(servers), [0] * servers
    running: list[list[tuple[str, int]]] = [[] for _ in range(servers)]
    todo = [f"p{i}" for i in range(64 * servers)]
    while todo or any(running):
        free = [server for server in range(servers) if len(running[server]) < together]
        if todo and (server := placement.place(todo[0], free, range(servers))) is not None:
            hard = chance.uniform(0.6, 1.4)
            used = sum(256 + int(hard * chance.randrange(512, 2900)) for _ in range(24))
            placement.start(todo[0], 24 * 256, 24 * 4096)
            running[server].append((todo.pop(0), used))
            continue
        busy = [server for server in range(servers) if running[server]]
        server = chance.choices(busy, [faster if server == 0 else 1 for server in busy])[0]
        problem, used = running[server].pop(chance.randrange(len(running[server])))
        assert placement.server_of(problem) == server
        real[server] += used
        placement.finish(problem, 24 * 4096, used - 24 * 256)
    assert [placement.tokens(server) for server in range(servers)] == real
    even = sum(real) / servers
    assert max(abs(tokens - even) for tokens in real) <= 0.1 * even


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 5))
def test_known_sizes_differ_by_one_problem_at_most(sizes, servers):
    placement = Placement(servers)
    for i, size in enumerate(sizes):
        placement.place(f"p{i}", range(servers), range(servers))
        placement.start(f"p{i}", size, 0)
    tokens = [placement.tokens(server) for server in range(servers)]
    assert max(tokens) - min(tokens) <= max(sizes) and sum(tokens) == sum(sizes)


def test_a_lost_server_keeps_no_load_and_its_problems_find_another():
    placement = Placement(2)
    for problem in "abcd":
        placement.place(problem, range(2), range(2))
        placement.start(problem, 8, 2)
    on_first = [problem for problem in "abcd" if placement.server_of(problem) == 0]
    assert placement.lose(0) == on_first and len(on_first) == 2
    assert [placement.tokens(0), placement.tokens(1)] == [0, 20] and all(
        placement.server_of(problem) is None for problem in on_first
    )
    assert placement.place(on_first[0], [1], [1]) == 1  # the only one that is up
    placement.start(on_first[0], 10, 0)
    placement.join(0, [1])
    assert [placement.tokens(0), placement.tokens(1)] == [30, 30]  # it does not get all that comes now


def test_a_running_request_counts_as_much_of_its_limit_as_finished_ones_took():
    placement = Placement(2)
    for problem in "ab":
        placement.place(problem, range(2), range(2))
        placement.start(problem, 10, 100)
    assert [placement.tokens(0), placement.tokens(1)] == [110, 110]
    placement.finish("a", 100, 30)
    assert [placement.tokens(0), placement.tokens(1)] == [40, 40]


def test_a_full_server_is_waited_for():
    placement = Placement(2)
    for problem, server in (("a", 0), ("b", 1)):
        assert placement.place(problem, [server], range(2)) == server
        placement.start(problem, 100, 0)
    assert placement.place("c", [0], range(2)) == 0
    placement.start("c", 100, 0)
    assert placement.place("d", [0], range(2)) is None and placement.server_of("d") is None
    assert placement.place("d", [], range(2)) is None
    assert placement.place("d", [1], range(2)) == 1
