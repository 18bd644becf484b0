"""A training that starts its server itself, and loses it in the middle of a rollout; then the training itself ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.summary import Fault
from tests.faults.training import DETECTED_WITHIN_S, RECOVERED_WITHIN_S, TIMEOUT_S, Training
from tests.faults.whole_groups import assert_whole
from tests.sglang.processes import family, none_left


@pytest.fixture(scope="module")
def shared(runs: Path) -> Iterator[Training]:
    training = Training(runs / "own")
    yield training
    training.kill()


@pytest.fixture
def training(shared: Training) -> Training:
    """At work."""
    shared.go_on()
    return shared


def kill(processes: list[psutil.Process]) -> None:
    processes[0].kill()


def freeze(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGSTOP)


SERVER_FAULTS = {
    "kill -9 of the server": (lambda training: [training.server()], kill, None),
    "kill -9 of its scheduler": (lambda training: [training.scheduler()], kill, None),
    "its server frozen (SIGSTOP of every process)": (
        lambda training: family(training.server().pid),
        freeze,
        2 * TIMEOUT_S,
    ),
    "its scheduler frozen": (lambda training: [training.scheduler()], freeze, 2 * TIMEOUT_S),
}


@pytest.mark.parametrize("name", SERVER_FAULTS)
def test_its_server_is_started_again_with_the_current_adapter(
    training: Training, report: Callable[[Fault], None], name: str
):
    victims, do, allowed = SERVER_FAULTS[name]
    step = training.mid_batch()
    victims = victims(training)
    old = family(training.server().pid)
    at = time.monotonic()
    do(victims)
    lost = training.wait_for("SGLang server .* is lost: ", at, DETECTED_WITHIN_S)
    assert training.steps() == step - 1
    back = training.wait_for("SGLang server .* is back", lost.time, RECOVERED_WITHIN_S)
    training.wait_for_step(step + 1)
    assert none_left(old)
    assert len([line for line in training.lines if line.time >= at and "is lost" in line.text]) == 1
    for one in (step, step + 1):
        assert_whole(training.run, training.config, one)
    report(Fault(name, "goes on", lost.text.strip(), lost.time - at, allowed, back.time - at))


def test_ctrl_c_in_the_middle_of_a_rollout_saves_and_leaves_no_server(
    training: Training, report: Callable[[Fault], None]
):
    step = training.mid_batch()
    processes = training.processes()
    at = time.monotonic()
    training.send(signal.SIGINT)
    assert training.end() == 130
    seconds = time.monotonic() - at
    assert seconds < 30.0
    assert none_left(processes)
    (said,) = training.errors()
    assert said.startswith("error: interrupted; the run so far lies in")
    assert training.steps() == step - 1
    assert (training.run / "checkpoints" / f"step_{step - 1:06d}").is_dir()
    training.start(resume=True)
    training.wait_for_step(step, RECOVERED_WITHIN_S)
    assert_whole(training.run, training.config, step)
    report(Fault("Ctrl-C", "saved; goes on with --resume", said, seconds, None, time.monotonic() - at))


def test_kill_9_of_the_trainer_leaves_no_server_and_the_run_goes_on(
    training: Training, report: Callable[[Fault], None]
):
    step = training.mid_batch()
    processes = training.processes()
    assert len(processes) >= 4  # trainer, server, scheduler, detokenizer
    at = time.monotonic()
    training.send(signal.SIGKILL)
    assert none_left(processes)
    seconds = time.monotonic() - at
    training.end()
    assert training.steps() == step - 1
    training.start(resume=True)
    said = training.wait_for("engine sglang: the run goes on from there, but not bit for bit", at, 120.0)
    training.wait_for_step(step, RECOVERED_WITHIN_S)
    assert_whole(training.run, training.config, step)
    outcome = "no process left; goes on with --resume"
    report(Fault("kill -9 of the trainer", outcome, said.text.strip(), seconds, None, time.monotonic() - at))


def test_ctrl_c_while_the_server_starts(runs: Path, leaves_nothing: list):
    training = Training(runs / "starting")
    leaves_nothing.append(training)
    training.start()
    end = time.monotonic() + 120.0
    while len(training.processes()) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    processes = training.processes()
    training.send(signal.SIGINT)
    assert training.end() == 130
    assert none_left(processes)
