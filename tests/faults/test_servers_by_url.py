"""A training on two servers by URL, of which one or both go away in the middle of a rollout."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.servers import KEY, Servers
from tests.faults.summary import Fault
from tests.faults.training import DETECTED_WITHIN_S, RECOVERED_WITHIN_S, TIMEOUT_S, Training
from tests.faults.whole_groups import assert_whole
from tests.sglang.processes import none_left


@pytest.fixture(scope="module")
def shared(runs: Path, servers: Servers) -> Iterator[Training]:
    training = Training(runs / "by_url", servers.override, environment=servers.environment)
    yield training
    training.kill()


@pytest.fixture
def training(shared: Training) -> Training:
    """At work."""
    shared.go_on()
    return shared


def assert_both_are_used(training: Training, step: int) -> None:
    recorded = [json.loads(line) for line in (training.run / "metrics.jsonl").read_text().splitlines()][step - 1]
    tokens = recorded["tokens/prompt"] + recorded["tokens/generated"]
    assert tokens / 2 <= recorded["tokens/busiest_server"] < tokens


def kill(servers: Servers, n: int) -> None:
    os.kill(servers.processes[n].pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "do", "undo", "allowed"),
    [
        ("kill -9 of one of two servers, started again later", kill, Servers.start_again, None),
        ("one of two servers frozen, awake later", Servers.freeze, Servers.thaw, 2 * TIMEOUT_S),
    ],
    ids=["killed", "frozen"],
)
def test_one_of_two_goes_away_and_comes_back(
    training: Training, servers: Servers, report: Callable[[Fault], None], name, do, undo, allowed
):
    url = servers.urls[1].replace(".", r"\.")
    step = training.mid_batch(servers.processes[1].log)
    at = time.monotonic()
    do(servers, 1)
    lost = training.wait_for(f"SGLang server {url} is lost: ", at, DETECTED_WITHIN_S)
    assert training.steps() == step - 1
    training.wait_for_step(step + 1)  # by the other one alone
    undone = time.monotonic()
    undo(servers, 1)
    training.wait_for(f"SGLang server {url} is back", undone, RECOVERED_WITHIN_S)
    seconds = time.monotonic() - undone
    back = training.steps() + 1
    training.wait_for_step(back + 1)
    for one in (step, step + 1, back, back + 1):
        assert_whole(training.run, training.config, one)
    assert_both_are_used(training, back + 1)
    outcome = "goes on with the other; used again when back"
    report(Fault(name, outcome, lost.text.strip(), lost.time - at, allowed, seconds))


def test_a_server_that_others_use_cannot_be_flushed(
    training: Training, servers: Servers, report: Callable[[Fault], None]
):
    """Requests that another keeps pending, so that the cache cannot be emptied for the next version."""
    training.wait_for_step(1, RECOVERED_WITHIN_S)
    done = threading.Event()

    def use() -> None:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
        while not done.is_set():
            httpx.post(
                f"{servers.urls[0]}/generate", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=None
            )

    others = [threading.Thread(target=use) for _ in range(3)]
    at = time.monotonic()
    for one in others:
        one.start()
    try:
        assert training.end(RECOVERED_WITHIN_S) == 1
        seconds = time.monotonic() - at
    finally:
        done.set()
        for one in others:
            one.join()
    error, how = training.errors()
    assert "does another run use this server?" in error and how.startswith("the run so far lies in")
    steps = training.steps()
    training.start(resume=True)
    training.wait_for_step(steps + 1, RECOVERED_WITHIN_S)
    assert_whole(training.run, training.config, steps + 1)
    outcome = "stops; goes on with --resume"
    report(Fault("flush while another's requests are pending", outcome, error, seconds, None))


def test_all_servers_lost_for_too_long_stop_the_run(
    training: Training, servers: Servers, report: Callable[[Fault], None]
):
    training.mid_batch(servers.processes[0].log)
    training.send(signal.SIGTERM)
    assert training.end() == 143
    training.start(resume=True, changes=("rollout.sglang.start_timeout_s=20",))
    training.wait_for("engine sglang: the run goes on", 0.0, 120.0)
    steps = training.steps()
    training.wait_for_step(steps + 1)
    step = training.mid_batch(servers.processes[0].log)
    processes = training.processes()
    at = time.monotonic()
    for n in range(2):
        servers.freeze(n)
    try:
        assert training.end(DETECTED_WITHIN_S + 60.0) == 1
        seconds = time.monotonic() - at
    finally:
        for n in range(2):
            servers.thaw(n)
    assert none_left(processes)
    error, how = training.errors()
    assert error.startswith("error: no SGLang server for 20 s (rollout.sglang.start_timeout_s): ")
    assert all(url in error for url in servers.urls) and how.startswith("the run so far lies in")
    assert training.steps() == step - 1
    training.start(resume=True, changes=("rollout.sglang.start_timeout_s=300",))
    training.wait_for_step(step, RECOVERED_WITHIN_S)
    assert_whole(training.run, training.config, step)
    outcome = "stops; goes on with --resume"
    report(Fault("all servers frozen", outcome, error, seconds, 2 * TIMEOUT_S + 20.0))
