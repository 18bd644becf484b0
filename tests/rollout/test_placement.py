"""Problems on servers: each on one, tokens even."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_fast.rollout.sglang.placement import Placement


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("together", [16, 1000])
def test_load_is_even_within_a_tenth_at_64_problems_per_server(servers, seed, together):
    """24 traces a problem, of lengths nobody knows before, hard problems with longer ones; `together` at a time."""
    chance = random.Random(seed)
    placement, real = Placement(servers), [0] * servers
    running: list[tuple[str, int, int]] = []
    todo = [f"p{i}" for i in range(64 * servers)]
    while todo or running:
        while todo and len(running) < together:
            problem, hard = todo.pop(0), chance.uniform(0.6, 1.4)
            used = sum(256 + int(hard * chance.randrange(512, 2900)) for _ in range(24))
            placement.place(problem, range(servers))
            placement.add(problem, 24 * (256 + 4096))
            running.append((problem, used, 24 * (256 + 4096)))
        problem, used, asked = running.pop(chance.randrange(len(running)))
        real[placement.server_of(problem)] += used
        placement.add(problem, used - asked)
    assert placement.tokens == real
    even = sum(real) / servers
    assert max(abs(tokens - even) for tokens in real) <= 0.1 * even


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 5))
def test_known_sizes_differ_by_one_problem_at_most(sizes, servers):
    placement = Placement(servers)
    for i, size in enumerate(sizes):
        placement.place(f"p{i}", range(servers))
        placement.add(f"p{i}", size)
    assert max(placement.tokens) - min(placement.tokens) <= max(sizes)
    assert sum(placement.tokens) == sum(sizes)


def test_a_lost_server_keeps_no_load_and_its_problems_find_another():
    placement = Placement(2)
    for problem in "abcd":
        placement.place(problem, range(2))
        placement.add(problem, 10)
    on_first = [problem for problem in "abcd" if placement.server_of(problem) == 0]
    assert placement.lose(0) == on_first and len(on_first) == 2
    assert placement.tokens == [0, 20] and all(placement.server_of(problem) is None for problem in on_first)
    assert placement.place(on_first[0], [1]) == 1  # the only one that is up
