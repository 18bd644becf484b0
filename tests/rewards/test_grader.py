from __future__ import annotations

import importlib.util
import re

import pytest

from spiral_fast.config import Config, ConfigError
from spiral_fast.install import install_command
from spiral_fast.rewards import TooManyUngradable, Verdict, check_ungradable, make_grader
from spiral_fast.rewards.exact import ExactGrader, PartsGrader
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
    ],
)
def test_which_grader_a_run_uses(source, kind, grader):
    assert type(make_grader(config_of(source, kind=kind))) is grader


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
