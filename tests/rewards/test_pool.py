"""Grading processes under attack: each request gets its verdict, the next one is graded, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import typer

from spiral_fast.commands import short_errors
from spiral_fast.config import RewardConfig
from spiral_fast.rewards import GraderFailed
from spiral_fast.rewards.function import FunctionGrader
from spiral_fast.rewards.math import MathGrader
from spiral_fast.rewards.pool import PoolGrader
from spiral_fast.rewards.process import LONGEST_REPLY, STARTS
from spiral_fast.trace import Problem

BEHAVIOURS = f"{Path(__file__).with_name('behaviours.py')}:reward"


def item(behaviour: str, **data) -> tuple[Problem, str, str]:
    return Problem("p", behaviour, "", data), "\\boxed{7}", "stop"


def pids(grader: PoolGrader) -> list[int]:
    return [process.process.pid for process in grader._processes]


def running(pid: int) -> bool:
    """Whether the process runs; one that was killed may still wait for its parent to notice."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(left: list[int]) -> bool:
    """Whether all of them end: a kill takes effect when the kernel comes to it."""
    deadline = time.monotonic() + 30
    while any(map(running, left)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(running, left))


@pytest.fixture(scope="module")
def grader():
    with FunctionGrader(RewardConfig(workers=1, timeout_s=2, memory_mb=512), BEHAVIOURS) as grader:
        yield grader


@pytest.mark.parametrize(
    ("behaviour", "data", "reason"),
    [
        ("endless_loop", {}, "no verdict within 2.0 s"),
        ("one_long_c_call", {}, "no verdict within 2.0 s"),
        ("slow", {"seconds": 600}, "no verdict within 2.0 s"),
        ("half_a_line", {}, "no verdict within 2.0 s"),
        ("memory_bomb", {}, "MemoryError"),
        ("slow_memory_bomb", {}, "MemoryError"),
        ("endless_recursion", {}, "RecursionError"),
        ("crash", {}, "the grading process died"),
        ("leave", {}, "the grading process died"),
        ("garbage_without_end", {}, "the grading process died"),
        ("garbage_to_the_trainer", {"text": "no JSON\n"}, "the grading process died"),
        ("garbage_to_the_trainer", {"text": "[]\n"}, "the grading process died"),
        ("garbage_to_the_trainer", {"text": "[" * 500_000 + "\n"}, "the grading process died"),
        ("garbage_to_the_trainer", {"text": '{"number": 999, "reward": 1.0}\n'}, "the grading process died"),
        ("garbage_to_the_trainer", {"text": "\n" + "x" * LONGEST_REPLY}, "the grading process died"),
        ("exit_python", {}, "SystemExit: enough"),
        ("fail", {}, "ValueError: the first line"),
        ("fail_silently", {}, "ValueError"),
        ("raise_by_name", {"name": "interrupt"}, "KeyboardInterrupt"),
        ("raise_by_name", {"name": "cancelled"}, "CancelledError"),
        ("raise_by_name", {"name": "nameless"}, "Nameless"),
        ("answer_of", {"text": "\ud800"}, "UnicodeEncodeError: 'utf-8' codec can't encode"),
        ("answer_of", {"text": "x", "times": 2**21}, "ValueError: the reward returned an answer of more than 100000"),
    ],
)
def test_what_goes_wrong_is_not_graded_and_the_next_one_is(grader, behaviour, data, reason):
    failed, good = grader.grade([item(behaviour, **data), item("value", value=0.5)])
    assert (failed.reward, failed.verdict, failed.answer) == (0.0, "could_not_grade", "7")
    assert failed.reason.startswith(reason) and "\n" not in failed.reason
    assert (good.reward, good.verdict, good.reason) == (0.5, "wrong", "")


@pytest.mark.parametrize("rest", ["", ', "reward": "1"', ', "reward": 1.0, "answer": 7', ', "reason": null'])
def test_a_reply_in_another_form_is_none(rest):
    with FunctionGrader(RewardConfig(workers=1), BEHAVIOURS) as grader:
        forged = item("garbage_to_the_trainer", text='{"number": 1' + rest + "}\n")
        assert [v.reason for v in grader.grade([forged, item("value", value=1)])] == ["the grading process died", ""]


def test_prints_and_standard_input_never_meet_the_protocol(grader):
    before = grader.restarts
    assert [v.reward for v in grader.grade([item("print_a_lot"), item("value", value=0.5)])] == [1.0, 0.5]
    assert grader.restarts == before


def test_restarts_are_counted(grader):
    before, (pid,) = grader.restarts, pids(grader)
    grader.grade([item("endless_loop")])
    assert grader.restarts == before + 1 and pids(grader) != [pid] and not psutil.pid_exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_a_process_that_keeps_more_and_more_is_replaced(grader):
    """At most 512 MB more in one call, and no process that holds 512 MB more than after its import is used again."""
    before = grader.restarts
    verdicts = [grader.grade([item("keep", megabytes=200 + i)])[0] for i in range(7)]
    assert [verdict.reward for verdict in verdicts] == [1, 2, 3, 1, 2, 3, 1] and grader.restarts == before + 2


def test_a_process_killed_from_outside_between_gradings(grader):
    before = grader.restarts
    os.kill(pids(grader)[0], signal.SIGKILL)
    assert grader.grade([item("value", value=1)])[0].verdict == "correct"
    assert grader.restarts == before + 1


def test_a_process_killed_from_outside_in_the_middle_is_not_the_answers_fault(grader):
    before = grader.restarts
    verdict = grader.submit(*item("slow", seconds=1))
    time.sleep(0.3)
    os.kill(pids(grader)[0], signal.SIGKILL)
    assert verdict.result().verdict == "correct" and grader.restarts == before + 1


def test_a_stopped_process_is_replaced_at_the_deadline_though_it_reads_nothing(grader):
    os.kill(pids(grader)[0], signal.SIGSTOP)
    long = Problem("p", "value", "", {"value": 1.0}), "x" * 2**22, "stop"  # more than the socket holds
    failed, good = grader.grade([long, item("value", value=1.0)])
    assert failed.reason == "no verdict within 2.0 s" and good.reward == 1.0


@pytest.mark.parametrize(
    ("generations", "each", "then", "reason"),
    [(1, 3, "hang", "no verdict"), (3, 4, "hang", "no verdict"), (1, 3, "crash", "")],
    ids=["children", "fork bomb", "of a crash"],
)
def test_children_end_with_their_grading(grader, tmp_path, generations, each, then, reason):
    record = tmp_path / "pids"
    record.touch()
    data = {"generations": generations, "each": each, "record": str(record), "then": then}
    (verdict,) = grader.grade([item("children", **data)])
    assert verdict.verdict == "could_not_grade" and verdict.reason.startswith(reason)
    left = [int(pid) for pid in record.read_text().split()]
    assert len(left) >= sum(each**g for g in range(1, generations + 1)) and end(left)


def test_a_program_ends_with_its_grading(grader, tmp_path):
    record = tmp_path / "pid"
    assert grader.grade([item("program", record=str(record))])[0].verdict == "could_not_grade"
    assert end([int(record.read_text())])


def test_children_left_behind_end_with_the_grader(tmp_path):
    record = tmp_path / "pids"
    record.touch()
    with FunctionGrader(RewardConfig(workers=1), BEHAVIOURS) as grader:
        data = {"generations": 1, "each": 2, "record": str(record), "then": "return when they run"}
        assert grader.grade([item("children", **data)])[0].reward == 1.0
        left = [int(pid) for pid in record.read_text().split()]
        assert len(left) == 2 and all(map(running, left))
    assert end(left)


def test_a_fork_that_returns_twice_answers_once(grader):
    for _ in range(3):
        assert [v.reward for v in grader.grade([item("fork_and_go_on_in_both"), item("value", value=0.25)])] == [
            1,
            0.25,
        ]


def test_usable_from_any_thread_with_several_processes():
    results: dict[int, list[float]] = {}
    with FunctionGrader(RewardConfig(workers=2), BEHAVIOURS) as grader:

        def work(i: int) -> None:
            verdicts = grader.grade([item("slow", seconds=0.05, value=0.5), item("value", value=i)])
            results[i] = [verdict.reward for verdict in verdicts]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        processes = pids(grader)
    assert results == {i: [0.5, i] for i in range(6)}
    assert not any(map(psutil.pid_exists, processes))
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([item("value", value=1)])


def test_leaving_gives_up_what_is_being_graded_at_once():
    with FunctionGrader(RewardConfig(workers=2, timeout_s=600), BEHAVIOURS) as grader:
        verdicts = [grader.submit(*item("slow", seconds=600 + i)) for i in range(6)]
        processes = pids(grader)
    assert all(verdict.done() for verdict in verdicts) and not any(map(psutil.pid_exists, processes))
    with pytest.raises(RuntimeError, match="closed"):
        verdicts[0].result()


@pytest.mark.skipif(sys.platform != "linux", reason="others tell the cores of the machine")
def test_the_number_of_processes_by_default():
    with FunctionGrader(RewardConfig(), BEHAVIOURS) as grader:
        assert len(set(pids(grader))) == min(4, len(psutil.Process().cpu_affinity()))


TRAINER = """
import sys, time
from spiral_fast.config import Config, RewardConfig
from spiral_fast.rewards.function import FunctionGrader
from spiral_fast.rewards.grading import Grading
from spiral_fast.trace import Problem, ProblemRollout, Trace, TraceKey

behaviours, behaviour, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
reward = RewardConfig(workers=2, timeout_s=timeout_s, kind="function", function=behaviours)
config = Config.model_validate(
    {"run_dir": "x", "model": {"path": "m"}, "problems": {"source": "chain_sum"}, "reward": reward.model_dump()}
)
with FunctionGrader(reward, behaviours) as grader:
    print(*[process.process.pid for process in grader._processes], flush=True)
    grading, rollouts = Grading(grader), []
    for i in range(6 if behaviour else 0):
        problem = Problem(f"p{i}", behaviour, "", {"seconds": 600} if behaviour == "slow" else {})
        trace = Trace(TraceKey(problem.id, 0, -1, 0), [1], [1], None, "stop", 0, f"{i}")
        rollouts.append(ProblemRollout(problem, i, [trace], [], []))
        grading.submit(problem, trace)
    for process in grader._processes:
        process.config = reward.model_copy(update={"timeout_s": 600})  # only the process's own limits are left
    grading.finish(rollouts) if behaviour else time.sleep(600)
"""


def trainer(behaviour: str, timeout_s: float) -> tuple[subprocess.Popen, list[psutil.Process]]:
    command = [sys.executable, "-c", TRAINER, BEHAVIOURS, behaviour, str(timeout_s)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return parent, [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]


@pytest.mark.parametrize("behaviour", ["", "slow", "endless_loop", "one_long_c_call"])
def test_processes_end_with_a_killed_trainer(behaviour):
    parent, processes = trainer(behaviour, 0.2)
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    gone, _ = psutil.wait_procs(processes, timeout=90)
    assert len(gone) == 2


@pytest.mark.parametrize(("behaviour", "times"), [("slow", 1), ("one_long_c_call", 1), ("slow", 2)])
def test_ctrl_c_does_not_wait_for_the_answers_in_hand(behaviour, times):
    parent, processes = trainer(behaviour, 600)
    time.sleep(1)
    for _ in range(times):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.002)
    try:
        _, printed = parent.communicate(timeout=60)  # against 600 s an answer
    finally:
        parent.kill()
    assert parent.returncode == -signal.SIGINT and printed.rstrip().endswith("KeyboardInterrupt")
    assert len(processes) == 2 and not any(process.is_running() for process in processes)


def test_ctrl_c_while_the_processes_start(tmp_path):
    module = tmp_path / "slow_to_import.py"
    module.write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-c", TRAINER, f"{module}:reward", "", "600"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(psutil.Process(parent.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGINT)
    try:
        _, printed = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert printed.rstrip().endswith("KeyboardInterrupt")
    assert len(processes) == 2 and not any(process.is_running() for process in processes)


def test_processes_that_do_not_start_are_one_line_after_some_trials(monkeypatch, capsys):
    starts = []
    popen = subprocess.Popen
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: starts.append(1) or popen(*args, **kwargs))

    def grade():
        with MathGrader(RewardConfig(workers=1)):
            pass

    with pytest.raises(GraderFailed):
        grade()
    assert len(starts) == STARTS
    with pytest.raises(typer.Exit) as stop:
        short_errors(grade)()
    assert stop.value.exit_code == 1
    assert capsys.readouterr().err == (
        "error: a grading process did not start: run `/bin/false -c 'import math_verify'` to see why\n"
    )


@pytest.mark.parametrize("place", ["leaves", "leaves.py"])
def test_a_module_that_ends_python_is_named_with_a_command_that_shows_it(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    Path("leaves.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(GraderFailed) as error, FunctionGrader(RewardConfig(workers=1), f"{place}:reward"):
        pass
    command = re.search("`(.*)`", str(error.value)).group(1)
    shown = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert shown.returncode != 0 and "KeyboardInterrupt" in shown.stderr


def test_one_failed_start_is_tried_again(monkeypatch):
    popen, starts = subprocess.Popen, []

    def flaky(command, **kwargs):
        starts.append(1)
        return popen(["/bin/false"] if len(starts) == 1 else command, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", flaky)
    with FunctionGrader(RewardConfig(workers=1), BEHAVIOURS) as grader:
        assert grader.grade([item("value", value=1)])[0].reward == 1.0
    assert len(starts) == 2


def test_a_replacement_that_does_not_start_reaches_whoever_waits(monkeypatch):
    with FunctionGrader(RewardConfig(workers=1), BEHAVIOURS) as grader:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(GraderFailed, match="behaviours"):
            grader.grade([item("leave")])
