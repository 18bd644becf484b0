"""Known answers of text tasks through a tokenizer and the run's grader."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from spiral_fast.config import Config
from spiral_fast.problems import load_problems
from spiral_fast.prompts import make_prompts
from spiral_fast.rewards.boxed import last_box
from spiral_fast.trace import Problem
from spiral_fast.verify.known_answers import right_answer, wrong_answer
from spiral_fast.verify.result import Result
from spiral_fast.verify.round_trip import rewards_round_trip
from tests.prompts.test_text import TEMPLATES, make_tokenizer
from tests.rewards.test_documented import block

SOUND = ["12", "-3", "0", "0.25", "1/3", r"\frac{3}{4}", "x^2+1", r"\sqrt{2}", "(1, 2)", r"50\%", r"\{1,2,3\}", "[0,1)"]


def round_trip(tmp_path, answers: list[str], **reward) -> Result:
    for name, part in (("train", answers[1:]), ("eval", answers[:1])):
        lines = [json.dumps({"question": f"{name} {i}", "answer": a, "id": f"{name}-{i}"}) for i, a in enumerate(part)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    problems = {"train_file": str(tmp_path / "train"), "eval_file": str(tmp_path / "eval"), "id_field": "id"}
    return _of({"source": "jsonl"} | problems, reward)


def _of(problems: dict, reward: dict) -> Result:
    config = Config.model_validate(
        {"run_dir": "none", "model": {"path": "none"}, "problems": problems, "reward": reward}
    )
    prompts = make_prompts(config, make_tokenizer(next(iter(TEMPLATES.values()))))
    return rewards_round_trip(SimpleNamespace(config=config, problems=load_problems(config), prompts=prompts))


def test_answers_that_can_be_graded(tmp_path):
    result = round_trip(tmp_path, SOUND)
    assert (result.status, result.figure) == ("pass", f"0 of {len(SOUND)} wrong"), result.note


def test_words_under_exact(tmp_path):
    assert round_trip(tmp_path, ["yes", "no", "a b"], kind="exact").status == "pass"


def test_references_that_no_answer_can_match_are_named(tmp_path):
    result = round_trip(tmp_path, [*SOUND[:3], r"\frac{1}{2", "}"])
    assert (result.status, result.figure) == ("fail", "2 of 5 wrong")
    assert "'train-2': the reference answer" in result.note and "'train-3': the reference answer" in result.note


def test_a_function_that_reads_another_format(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def reward(question, answer, completion, finish_reason, data):\n"
        "    return float(completion.endswith(f'ANSWER: {answer}'))\n"
    )
    result = round_trip(tmp_path, SOUND[:4], kind="function", function=f"{tmp_path}/mine.py:reward")
    assert (result.status, result.figure) == ("fail", "4 of 4 wrong")


def test_a_function_with_partial_credit_and_a_tolerance(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from spiral_fast.rewards.boxed import last_box\n\n\n"
        "def reward(question, answer, completion, finish_reason, data):\n"
        "    right = abs(float(last_box(completion)) - float(answer)) <= 0.05 * abs(float(answer))\n"
        "    return 0.1 + 0.9 * right\n"
    )
    result = round_trip(tmp_path, ["12", "-3", "1000", "0.25"], kind="function", function=f"{tmp_path}/mine.py:reward")
    assert result.status == "pass", result.note


def test_the_documented_function_reads_what_the_prompts_ask_for(tmp_path):
    (tmp_path / "mine.py").write_text(block("python"))
    function = {"kind": "function", "function": f"{tmp_path}/mine.py:closeness", "correct_at": 0.95}
    result = round_trip(tmp_path, ["12", "-3", "0", "0.25", "1000"], **function)
    assert result.status == "pass", result.note


@pytest.mark.parametrize("task", ["countdown", "basic_arithmetic", "letter_counting"])
def test_tasks_of_reasoning_gym(task):
    result = _of({"source": "reasoning_gym", "task": task, "train_size": 12, "eval_size": 4}, {})
    assert result.status == "pass", result.note


@pytest.mark.parametrize("answer", ["0", "1", "-1", "12", "-12", " +7 ", "9" * 2000, "x", "987654321"])
def test_a_changed_answer_is_another(answer):
    problem = Problem("p", "q", answer)
    right, wrong = (last_box(write(problem, "jsonl")) for write in (right_answer, wrong_answer))
    assert right == answer.strip() != wrong and (not wrong.lstrip("-").isdigit() or wrong not in ("", answer.strip()))
