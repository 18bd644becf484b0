"""Grading beside generation: the verdicts do not depend on what was submitted when."""

from __future__ import annotations

import math
import random
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from spiral_fast.config import Config
from spiral_fast.rewards import Grader, NonFiniteReward, TooManyUngradable, Verdict
from spiral_fast.rewards.exact import ExactGrader
from spiral_fast.rewards.function import FunctionGrader
from spiral_fast.rewards.grading import Grading, check_graded
from spiral_fast.rewards.math import MathGrader
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey


def config_of(**reward) -> Config:
    return Config.model_validate(
        {"run_dir": "runs/x", "model": {"path": "m"}, "problems": {"source": "jsonl"}, "reward": reward}
    )


def trace_of(problem: Problem, level: int, index: int, text: str) -> Trace:
    key = TraceKey(problem.id, level, 0 if level == AGGREGATION else -1, index)
    return Trace(key, [1], [2], np.zeros(1, np.float32), "stop", 0, text)


def rollouts_of(answers: dict[str, list[str]]) -> list[ProblemRollout]:
    """One problem with the reference 7 per name; its last answer is that of an aggregation trace."""
    rollouts = []
    for draw, (name, texts) in enumerate(answers.items()):
        problem = Problem(name, "candidates say \\boxed{7}", "7")
        *search, last = [f"\\boxed{{{text}}}" for text in texts]
        search = [trace_of(problem, SEARCH, i, text) for i, text in enumerate(search)]
        aggregation = [[trace_of(problem, AGGREGATION, 0, last)]]
        rollouts.append(ProblemRollout(problem, draw, search, np.array([[0]]), aggregation))
    return rollouts


class Table(Grader):
    """Gives what the table holds for a text; an exception is raised in the grading."""

    def __init__(self, table: dict[str, Verdict | Exception]):
        self.table, self.submitted = table, []

    def submit(self, problem, text, finish_reason):
        self.submitted.append((problem.id, text))
        found: Future[Verdict] = Future()
        entry = self.table[text]
        found.set_exception(entry) if isinstance(entry, Exception) else found.set_result(entry)
        return found


SEVEN = f"{Path(__file__).with_name('behaviours.py')}:seven"
RIGHT = Verdict(1.0, "correct", "7")


@pytest.mark.parametrize("submitted", ["none", "all", "shuffled", "some"])
def test_verdicts_in_the_order_of_traces_whatever_was_submitted(submitted):
    rollouts = rollouts_of({"a": ["7", "8", "7"], "b": ["", "9", "8"]})
    traces = [(rollout.problem, trace) for rollout in rollouts for trace in rollout.traces()]
    random.Random(0).shuffle(traces) if submitted == "shuffled" else None
    with ExactGrader() as grader:
        grading = Grading(grader)
        for problem, trace in {"none": [], "some": traces[1::2]}.get(submitted, traces):
            grading.submit(problem, trace)
        grading.finish(rollouts)
    found = [(trace.reward, trace.verdict, trace.answer) for rollout in rollouts for trace in rollout.traces()]
    right, wrong = (1.0, "correct", "7"), (0.0, "wrong")
    assert found == [right, (*wrong, "8"), right, (*wrong, None), (*wrong, "9"), (*wrong, "8")]


def test_equal_answers_of_one_grading_are_graded_once_even_when_the_first_is_done():
    rollouts = rollouts_of({"a": ["7", " 7", "8"], "b": ["7", "8", "8"]})
    asked = []
    with MathGrader(config_of(workers=1).reward) as grader:
        for process in grader._processes:
            process.ask = lambda request, ask=process.ask: asked.append(request) or ask(request)
        for _ in range(2):  # a new grading grades anew
            grading = Grading(grader)
            for rollout in rollouts:
                for trace in rollout.traces():
                    grading.submit(rollout.problem, trace)
                    grading._verdicts[-1].result()
            grading.finish(rollouts)
    assert asked == 2 * [["7", "7"], ["7", "8"]]


def test_rewards_that_are_not_finite_name_their_problems():
    rollouts = rollouts_of({"a": ["7", "7"], "b": ["nan", "7"], "c": ["7", "inf"], "d": ["nan", "nan"]})
    table = {
        "\\boxed{7}": RIGHT,
        "\\boxed{nan}": Verdict(math.nan, "wrong", "7"),
        "\\boxed{inf}": Verdict(-math.inf, "wrong", "7"),
    }
    with pytest.raises(NonFiniteReward, match="'b', 'c', 'd'") as error:
        Grading(Table(table)).finish(rollouts)
    assert error.value.problems == ["b", "c", "d"] and isinstance(error.value, FloatingPointError)
    assert rollouts[0].search[0].reward == 1.0 and math.isnan(rollouts[1].search[0].reward)  # filled, for the record


def test_the_share_of_ungradable_answers_is_that_of_the_whole_grading():
    table = {"\\boxed{7}": RIGHT, "\\boxed{8}": Verdict(0.0, "could_not_grade", "8", "it died")}
    rollouts = rollouts_of({"a": ["7", "8"], "b": ["7", "7"]})
    graded = list(zip(rollouts, Grading(Table(table)).finish(rollouts), strict=True))
    check_graded(graded, config_of(max_ungradable=0.25))
    assert rollouts[0].aggregation[0][0].verdict == "could_not_grade"
    with pytest.raises(TooManyUngradable, match="1 of 4 answers.*'a' \\(it died\\)"):
        check_graded(graded, config_of(max_ungradable=0.24))


def test_an_exception_in_a_grading_thread_reaches_finish():
    rollouts = rollouts_of({"a": ["7", "8"]})
    with FunctionGrader(config_of(workers=1).reward, SEVEN) as grader:

        def fail(request):
            raise OSError("no more file descriptors")

        grader._processes[0].ask = fail
        grading = Grading(grader)
        for trace in rollouts[0].traces():
            grading.submit(rollouts[0].problem, trace)
        with pytest.raises(OSError, match="file descriptors"):
            grading.finish(rollouts)


def test_what_is_left_before_it_begins_is_never_graded_and_can_be_asked_for_again():
    (rollout,) = rollouts_of({"a": ["7", "8", "9"]})
    go, asked = threading.Event(), []
    with FunctionGrader(config_of(workers=1).reward, SEVEN) as grader:
        (process,) = grader._processes
        ask = process.ask
        process.ask = lambda request: go.wait(60) and (asked.append(request[2]) or ask(request))
        with pytest.raises(FloatingPointError), Grading(grader) as grading:
            for trace in rollout.traces():
                grading.submit(rollout.problem, trace)
            raise FloatingPointError("the engine failed")
        go.set()
        assert grader.submit(rollout.problem, "\\boxed{5}", "stop").result().reward == 0.0
        assert set(asked) <= {"\\boxed{7}", "\\boxed{5}"}
        grading.finish([rollout])
    assert [trace.reward for trace in rollout.traces()] == [1.0, 0.0, 0.0]
