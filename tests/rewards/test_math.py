"""Mathematical answers: verdicts by table, and expressions that hang, crash or eat memory."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from spiral_fast.config import RewardConfig
from spiral_fast.rewards.math import MathGrader
from spiral_fast.trace import Problem
from tests.rewards.answer_table import SURPRISING, TABLE, box


def item(reference: str, completion: str):
    return Problem("p", "candidates say \\boxed{5}", reference), completion, "length"


@pytest.fixture(scope="module")
def grader():
    with MathGrader(RewardConfig(workers=1, timeout_s=60)) as grader:
        yield grader


@pytest.fixture(scope="module")
def hasty():
    with MathGrader(RewardConfig(workers=1, timeout_s=1, memory_mb=512)) as grader:
        yield grader


@pytest.mark.parametrize("table", [TABLE, SURPRISING], ids=["table", "surprising"])
def test_table(grader, table):
    rows = [row for row in table if row[0] != "hang"]
    verdicts = grader.grade([item(reference, completion) for _, reference, completion, _ in rows])
    assert [(*row[:3], verdict.verdict) for row, verdict in zip(rows, verdicts, strict=True)] == rows
    assert [verdict.reward for verdict in verdicts] == [float(row[3] == "correct") for row in rows]
    assert [bool(verdict.reason) for verdict in verdicts] == [row[3] == "could_not_grade" for row in rows]


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "hang"], ids=lambda row: row[2])
def test_what_hangs_is_killed_and_the_next_one_is_graded(hasty, row):
    _, reference, completion, expected = row
    hostile, good = hasty.grade([item(reference, completion), item("5", box("5"))])
    assert (hostile.verdict, hostile.reward) == (expected, 0.0) and hostile.reason
    assert good.verdict == "correct"


def test_every_row_is_there_once_and_no_kind_has_two_names():
    assert len({row[1:3] for row in TABLE + SURPRISING}) == len(TABLE + SURPRISING) >= 60
    assert len({row[0] for row in TABLE}) >= 30


ADVERSARIAL = {
    "deep nesting": "(" * 3000 + "5" + ")" * 3000,
    "nested fractions": "\\frac{1}{" * 400 + "1" + "}" * 400,
    "large sum": "\\sum_{i=1}^{10^{12}} \\frac{1}{i}",
    "large determinant": "\\det\\begin{pmatrix}" + "\\\\".join(["&".join("abcdefghij")] * 10) + "\\end{pmatrix}",
    "many full stops": "." * 10_000 + "5" + "." * 10_000,
    "many groups of digits": "1" + " 000" * 5_000 + "/",
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_answers_end_and_the_next_one_is_graded(hasty, name):
    hostile, good = hasty.grade([item("5", box(ADVERSARIAL[name])), item("5", box("5"))])
    assert hostile.reward == 0.0 and hostile.verdict in ("wrong", "could_not_grade")
    assert (hostile.verdict == "could_not_grade") == bool(hostile.reason)
    assert good.verdict == "correct"


def test_memory_is_limited():
    with MathGrader(RewardConfig(workers=1, timeout_s=60, memory_mb=64)) as grader:
        (verdict,) = grader.grade([item("5", box("2^{4000000000} + 1"))])
        assert verdict.verdict == "could_not_grade" and "MemoryError" in verdict.reason
        (process,) = grader._processes
        assert process.process.poll() is not None or psutil.Process(process.process.pid).memory_info().rss < 400 * 2**20
        assert grader.grade([item("5", box("5"))])[0].verdict == "correct"


def test_equal_answers_are_graded_once(grader):
    (process,) = grader._processes
    seen, ask = [], process.ask
    process.ask = lambda request: seen.append(request) or ask(request)
    try:
        texts = [("5", "5"), ("5", " 5 "), ("6", "5"), ("5", "6"), ("5", "5")]
        verdicts = grader.grade([item(reference, box(answer)) for reference, answer in texts])
    finally:
        del process.ask
    assert seen == [["5", "5"], ["6", "5"], ["5", "6"]]
    assert [v.reward for v in verdicts] == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_a_grading_process_loads_neither_torch_nor_the_model(tmp_path):
    code = (
        "import sys\nfrom spiral_fast.rewards.child import __main__\n"
        "__main__.reward_of({'kind': 'math'})('1', '1')\nassert 'math_verify' in sys.modules\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
