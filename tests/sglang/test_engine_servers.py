"""The engine with a server of its own, through a kill -9, and with two servers."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from spiral_fast.config import Config
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import generate
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.sglang.connection import ByUrl
from spiral_fast.rollout.sglang.engine import SglangEngine
from spiral_fast.rollout.two_stage import roll_out
from tests.sglang.processes import family, none_left
from tests.sglang.test_engine import PROBLEMS, TreePrompts, compare_log_probs, gaps, random_prompts, request
from tests.sglang.tiny_server import draw_adapter, load, make_config


@pytest.fixture(scope="module")
def config(model_folder) -> Config:
    shape = {"n_search": 4, "n_sets": 4, "set_size": 2, "n_aggregations": 2}
    limits = {"search_max_new_tokens": 60, "aggregation_max_new_tokens": 20}
    return make_config(model_folder, rollout=shape | limits)


@pytest.fixture(scope="module")
def loaded(config) -> LoadedModel:
    return load(config)


def children() -> set[int]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split()
    return set(map(int, found))


def server_started(before: set[int]) -> int:
    """The process of the server that was started since."""
    (pid,) = [
        pid
        for pid in children() - before
        if b"spiral_fast.rollout.sglang.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


@pytest.mark.sglang_smoke
@pytest.mark.timeout(900)
def test_a_server_of_its_own_through_a_kill(config, loaded, tmp_path):
    """Killed in the middle of a round, it is started again with the present adapter, and the problems it had are drawn
    again whole."""
    draw_adapter(loaded, 1)
    before, threads, said = children(), set(threading.enumerate()), []
    engine = make_engine(config, loaded, tmp_path, said.append)
    assert children() == before and not any(tmp_path.iterdir())  # nothing before it is needed
    engine.set_policy(3)
    first = family(server_started(before))
    drawn, seen = list(enumerate(PROBLEMS)), []

    def kill(problem, trace) -> None:
        seen.append(trace)
        if len(seen) == 20:
            os.kill(first[0].pid, signal.SIGKILL)

    found = roll_out(engine, TreePrompts(), drawn, config, on_trace=kill)
    assert none_left(first)
    second = family(server_started(before))
    traces = [trace for rollout in found for trace in rollout.traces()]
    assert len(traces) == 8 * 12 and all(trace.policy_version == 3 for trace in traces)
    dropped = [trace for trace in seen if not any(trace is kept for kept in traces)]
    assert dropped and {trace.key.problem for trace in dropped} < {problem.id for problem in PROBLEMS} | {""}
    source = PolicySource(loaded)
    assert max(np.abs(t.logp - source.log_probs(t.prompt, t.tokens, 1.0)).max() for t in traces) <= 1e-4
    assert ["is lost" in said[0], "is back" in said[-1]] == [True, True]
    draw_adapter(loaded, 2)
    engine.set_policy(4)
    compare_log_probs(engine, loaded, 0.7)
    log = tmp_path / "sglang_server.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    engine.close()
    assert none_left(second)
    assert {t for t in threading.enumerate() if t.name == "sglang"} <= threads


class Recorded(ByUrl):
    """Which prompts a server was sent."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.prompts: list[tuple[int, ...]] = []

    async def open(self):
        client = await super().open()
        real = client.generate

        async def generate(prompt, **settings):
            self.prompts.append(tuple(prompt))
            return await real(prompt, **settings)

        client.generate = generate
        return client


def test_problems_stay_on_one_of_two_servers_and_load_them_evenly(server, start_server, config, loaded):
    draw_adapter(loaded, 1)
    servers = [server, start_server(config)]
    connections = [Recorded(one.url, one.api_key, 20.0, None) for one in servers]
    engine = SglangEngine(
        lambda folder: connections,
        PolicySource(loaded),
        temperature=1.0,
        max_running=16,
        timeout_s=20.0,
        start_timeout_s=60.0,
        say=print,
    )
    found = roll_out(engine, TreePrompts(), list(enumerate(PROBLEMS)), config)
    places = defaultdict(set)
    for number, connection in enumerate(connections):
        for prompt in connection.prompts:
            places[prompt[3:15]].add(number)  # the problem's own tokens
    problems = [tuple(problem.data["ids"]) for problem in PROBLEMS]
    assert all(len(places[problem]) == 1 for problem in problems)
    assert {next(iter(places[problem])) for problem in problems} == {0, 1}
    assert engine.counts.hits >= 0.99 * engine.counts.cacheable and all(len(r.traces()) == 12 for r in found)

    # An update reaches both. 64 problems per server:
    draw_adapter(loaded, 2)
    engine.set_policy(1)
    asked = [
        request(prompt, problem=f"q{p}", index=i, max_new_tokens=12)
        for p, prompt in enumerate(random_prompts(8, 128))
        for i in range(3)
    ]
    before = engine.counts.busiest_server, engine.counts.prompt + engine.counts.generated
    assert max(gaps(loaded, asked[::12], generate(engine, asked)[::12])) <= 1e-4
    busiest = engine.counts.busiest_server - before[0]
    even = (engine.counts.prompt + engine.counts.generated - before[1]) / 2
    assert even <= busiest <= 1.1 * even
    engine.close()
