"""Grading in processes: verdicts by table, and expressions that hang, crash or eat memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import typer

from spiral_fast.commands import short_errors
from spiral_fast.config import RewardConfig
from spiral_fast.rewards.grader import GraderFailed
from spiral_fast.rewards.math import MathGrader
from spiral_fast.trace import Problem


def box(reference: str, answer: str):
    return Problem("p", "q", reference), f"so \\boxed{{{answer}}}", "stop"


@pytest.fixture(scope="module")
def grader():
    with MathGrader(RewardConfig(timeout_s=30)) as grader:
        yield grader


@pytest.fixture(scope="module")
def hasty():
    with MathGrader(RewardConfig(timeout_s=1, memory_mb=512)) as grader:
        yield grader


TABLE = [
    ("1/2", "0.5", "correct"),
    ("\\frac{1}{2}", "1/2", "correct"),
    ("\\frac12", "\\dfrac{1}{2}", "correct"),
    ("0.333", "1/3", "wrong"),  # a rounded decimal is not the fraction
    ("50%", "0.5", "correct"),
    ("50\\%", "50", "correct"),  # a percent sign may be left out
    ("7", "**7**", "correct"),
    ("7", "7.", "correct"),
    ("7", "$7$", "correct"),
    ("$7$", "7", "correct"),
    ("\\boxed{7}", "7", "correct"),
    ("12", "12\\text{ cm}", "correct"),
    ("5", "\\$5", "correct"),
    ("90^\\circ", "90", "correct"),
    ("(1,2)", "(1,2)", "correct"),
    ("(1,2)", "[1,2]", "wrong"),
    ("(-\\infty, 3]", "(-\\infty,3]", "correct"),
    ("3", "x=3", "correct"),
    ("1,000", "1000", "correct"),
    ("\\{1,2\\}", "\\{2,1\\}", "correct"),
    ("3", "1,2,3", "wrong"),  # listing answers until one fits
    ("x^2+2x+1", "(x+1)^2", "correct"),
    ("\\sqrt{2}", "\\sqrt{3}", "wrong"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "3", "wrong"),
    ("5", "\\frac{5}{0}", "wrong"),
    ("5", "\\begin{foo}", "wrong"),  # not mathematics: the model's fault
    ("5", "", "wrong"),
    ("", "5", "could_not_grade"),  # no reference: ours
    ("\\begin{foo}", "5", "wrong"),  # a reference that is only a string is compared as one
    ("\\begin{foo}", "\\begin{foo}", "correct"),
]


def test_table(grader):
    verdicts = grader.grade([box(reference, answer) for reference, answer, _ in TABLE])
    assert [(*row[:2], verdict.verdict) for row, verdict in zip(TABLE, verdicts, strict=True)] == TABLE
    assert [verdict.reward for verdict in verdicts] == [float(row[2] == "correct") for row in TABLE]


def test_only_the_last_box_of_the_completion_counts(grader):
    problem = Problem("p", "candidates: \\boxed{7}", "7")
    texts = ["\\boxed{7} no, \\boxed{8}", "\\boxed{8} no, \\boxed{7}", "the answer is 7", "\\boxed{7} and \\boxed{8"]
    verdicts = grader.grade([(problem, text, "length") for text in texts])
    assert [(v.verdict, v.answer) for v in verdicts] == [
        ("wrong", "8"),
        ("correct", "7"),
        ("wrong", None),
        ("correct", "7"),
    ]


ADVERSARIAL = {
    "power tower": "9^{9^{9^9}}",
    "huge exponent": "10^{999999999}",
    "factorials": "(((99999!)!)!)!",
    "deep nesting": "(" * 3000 + "5" + ")" * 3000,
    "nested fractions": "\\frac{1}{" * 400 + "1" + "}" * 400,
    "large sum": "\\sum_{i=1}^{10^{12}} \\frac{1}{i}",
    "large determinant": "\\det\\begin{pmatrix}" + "\\\\".join(["&".join("abcdefghij")] * 10) + "\\end{pmatrix}",
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_answers_end_and_the_next_one_is_graded(hasty, name):
    hostile, good = hasty.grade([box("5", ADVERSARIAL[name]), box("5", "5")])
    assert hostile.reward == 0.0 and hostile.verdict in ("wrong", "could_not_grade")
    assert (hostile.verdict == "could_not_grade") == bool(hostile.reason)
    assert good.verdict == "correct"


def test_a_hanging_grading_is_killed_and_says_so(hasty):
    before = hasty._workers[0].process.pid
    (verdict,) = hasty.grade([box("5", ADVERSARIAL["deep nesting"])])
    assert verdict.verdict == "could_not_grade" and "within 1.0 s" in verdict.reason
    assert not psutil.pid_exists(before) and hasty.grade([box("5", "5")])[0].reward == 1.0


def test_memory_is_limited():
    with MathGrader(RewardConfig(timeout_s=60, memory_mb=64)) as grader:
        (verdict,) = grader.grade([box("5", "2^{4000000000} + 1")])
        assert verdict.verdict == "could_not_grade" and "MemoryError" in verdict.reason
        assert psutil.Process(grader._workers[0].process.pid).memory_info().rss < 400 * 2**20


def test_equal_answers_are_graded_once(grader):
    seen = []
    ask = grader._workers[0].ask
    grader._workers[0].ask = lambda *pair: seen.append(pair) or ask(*pair)
    try:
        verdicts = grader.grade([box("5", "5"), box("5", " 5 "), box("6", "5"), box("5", "6"), box("5", "5")])
    finally:
        del grader._workers[0].ask
    assert seen == [("5", "5"), ("6", "5"), ("5", "6")]
    assert [v.reward for v in verdicts] == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_a_worker_that_died_is_replaced(grader):
    os.kill(grader._workers[0].process.pid, signal.SIGKILL)
    assert grader.grade([box("5", "5")])[0].verdict == "correct"


def test_usable_from_any_thread_with_several_workers():
    results: dict[int, list[float]] = {}
    with MathGrader(RewardConfig(workers=2)) as grader:

        def work(i: int) -> None:
            results[i] = [verdict.reward for verdict in grader.grade([box("5", "5"), box("5", str(i))])]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        workers = [worker.process.pid for worker in grader._workers]
    assert results == {i: [1.0, float(i == 5)] for i in range(6)}
    assert not any(psutil.pid_exists(pid) for pid in workers)
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([box("5", "5")])


@pytest.mark.parametrize("answer", ["5", ADVERSARIAL["deep nesting"]], ids=["idle", "computing"])
def test_workers_end_with_a_killed_parent(answer):
    code = (
        "import sys, threading, time\n"
        "from spiral_fast.config import RewardConfig\n"
        "from spiral_fast.rewards.math import MathGrader\n"
        "from spiral_fast.trace import Problem\n"
        "grader = MathGrader(RewardConfig(timeout_s=1)).__enter__()\n"
        "grader._workers[0].config = RewardConfig(timeout_s=60)\n"  # only the worker's own limit is left
        "print(grader._workers[0].process.pid, flush=True)\n"
        "grader.grade([(Problem('p', 'q', '5'), '\\\\boxed{' + sys.argv[1] + '}', 'stop')])\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, answer], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([worker], timeout=90)  # the limit is 3 s of CPU; a busy machine stretches them
    assert gone


def test_ctrl_c_does_not_wait_for_the_answers_in_hand():
    code = (
        "import sys\n"
        "from spiral_fast.config import RewardConfig\n"
        "from spiral_fast.rewards.math import MathGrader\n"
        "from spiral_fast.trace import Problem\n"
        "with MathGrader(RewardConfig(timeout_s=600, workers=2)) as grader:\n"
        "    print(*[worker.process.pid for worker in grader._workers], flush=True)\n"
        "    grader.grade([(Problem('p', 'q', str(i)), '\\\\boxed{' + sys.argv[1] + '}', 'stop') for i in range(6)])\n"
    )
    command = [sys.executable, "-c", code, ADVERSARIAL["deep nesting"]]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    time.sleep(1)
    parent.send_signal(signal.SIGINT)
    try:
        _, printed = parent.communicate(timeout=120)  # against 600 s an answer
    finally:
        parent.kill()
    assert parent.returncode == -signal.SIGINT and printed.rstrip().endswith("KeyboardInterrupt")
    assert len(workers) == 2 and not any(worker.is_running() for worker in workers)


def test_an_ended_worker_answers_no_more():
    with MathGrader(RewardConfig(workers=2)) as grader:
        for worker in grader._workers:
            worker.end()
        with pytest.raises(RuntimeError, match="interrupted"):
            grader.grade([box("5", "5"), box("6", "5"), box("7", "5")])


def test_processes_that_do_not_start_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    def grade():
        with MathGrader(RewardConfig(workers=2)):
            pass

    with pytest.raises(GraderFailed):
        grade()
    with pytest.raises(typer.Exit) as stop:
        short_errors(grade)()
    assert stop.value.exit_code == 1
    assert capsys.readouterr().err == (
        "error: a grading process did not start: run `/bin/false -c 'import math_verify'` to see why\n"
    )
