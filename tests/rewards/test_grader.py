from __future__ import annotations

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from spiral_fast.config import Config, ConfigError, refusals
from spiral_fast.install import install_command
from spiral_fast.rewards import TooManyUngradable, Verdict, check_ungradable, make_grader
from spiral_fast.rewards.exact import ExactGrader, PartsGrader
from spiral_fast.rewards.function import FunctionGrader
from spiral_fast.rewards.grader import CHECKS
from spiral_fast.rewards.math import MathGrader
from spiral_fast.trace import Problem


def config_of(source: str, **reward) -> Config:
    return Config.model_validate(
        {"run_dir": "runs/x", "model": {"path": "m"}, "problems": {"source": source}, "reward": reward}
    )


@pytest.mark.parametrize(
    ("source", "kind", "grader"),
    [
        ("parts", "auto", PartsGrader),
        ("parts", "exact", PartsGrader),
        ("chain_sum", "auto", ExactGrader),
        ("chain_sum", "math", MathGrader),
        ("jsonl", "auto", MathGrader),
        ("jsonl", "exact", ExactGrader),
        ("jsonl", "function", FunctionGrader),
        ("parts", "function", FunctionGrader),
    ],
)
def test_which_grader_a_run_uses(source, kind, grader):
    function = {"function": "my_module.my_reward"} if kind == "function" else {}
    assert type(make_grader(config_of(source, kind=kind, **function))) is grader


def test_a_source_with_a_check_of_its_own_has_it_run_in_grading_processes(monkeypatch):
    monkeypatch.setitem(CHECKS, "chain_sum", f"{Path(__file__).with_name('behaviours.py')}:seven")
    with make_grader(config_of("chain_sum", workers=1, correct_at=0.5)) as grader:
        assert type(grader) is FunctionGrader
        assert grader.grade([(Problem("p", "q", "7"), "\\boxed{7}", "stop")]) == [Verdict(1.0, "correct", "7")]
    assert type(make_grader(config_of("chain_sum", kind="exact"))) is ExactGrader
    assert all(find_spec(function.rpartition(".")[0]) for function in CHECKS.values() if "/" not in function)


@pytest.mark.parametrize(("source", "kind"), [("parts", "auto"), ("chain_sum", "exact"), ("jsonl", "math")])
def test_where_rewards_are_0_or_1_there_is_no_threshold(source, kind):
    with pytest.raises(ConfigError, match="reward.correct_at: 0.5 cannot be used"):
        make_grader(config_of(source, kind=kind, correct_at=0.5))


@pytest.mark.parametrize("reward", [{"kind": "function"}, {"function": "a.b"}, {"kind": "math", "function": "a.b"}])
def test_the_kind_function_and_its_name_belong_together(reward):
    assert ["reward.function"] == [
        line.split(":")[0] for line in refusals(config_of("chain_sum", **reward)) if "reward" in line
    ]


def test_math_cannot_grade_parts():
    with pytest.raises(ConfigError, match="reward.kind"):
        make_grader(config_of("parts", kind="math"))


def test_missing_math_verify_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(f"needs math-verify; run: {install_command('train')}")):
        make_grader(config_of("jsonl"))


def test_share_of_ungradable_answers():
    config = config_of("jsonl", max_ungradable=0.25)
    items = [(Problem(f"p{i}", "q", "1"), "\\boxed{1}", "stop") for i in range(8)]
    good = Verdict(1.0, "correct", "1")
    bad = Verdict(0.0, "could_not_grade", "1", "no verdict within 5 s")
    check_ungradable(items, [bad, bad] + [good] * 6, config)  # a quarter is allowed
    check_ungradable([], [], config)
    with pytest.raises(TooManyUngradable) as error:
        check_ungradable(items, [good] * 5 + [bad] * 3, config)
    line = str(error.value)
    assert line.startswith("3 of 8 answers") and "'p5' (no verdict within 5 s)" in line and "'p4'" not in line
    with pytest.raises(TooManyUngradable, match="and 3 more"):
        check_ungradable(items, [bad] * 8, config)


def test_zero_allows_none():
    config = config_of("jsonl", max_ungradable=0.0)
    item = (Problem("p", "q", ""), "\\boxed{1}", "stop")
    with pytest.raises(TooManyUngradable):
        check_ungradable([item], [Verdict(0.0, "could_not_grade", "1", "x")], config)
