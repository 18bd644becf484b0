"""The worked example of docs/rewards.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from spiral_fast.config import Config
from spiral_fast.rewards import Verdict, make_grader
from spiral_fast.trace import Problem
from tests.rewards.answer_table import SURPRISING, TABLE

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return text


def test_the_example_works_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(block("python"))
    run = {"run_dir": "runs/x", "model": {"path": "m"}, "problems": {"source": "chain_sum"}}
    config = Config.model_validate(run | yaml.safe_load(block("yaml")))
    problem = Problem("p", "4 + 3 = ?", "7", {"scale": 4})
    rows = [
        ("it is \\boxed{7}.", "stop", Verdict(1.0, "correct", "7")),
        ("it is \\boxed{7.1}", "stop", Verdict(0.975, "correct", "7.1")),
        ("it is \\boxed{8}", "stop", Verdict(0.75, "wrong", "8")),
        ("it is \\boxed{700}", "stop", Verdict(0.0, "wrong", "700")),
        ("\\boxed{seven}", "stop", Verdict(0.0, "wrong", None)),
        ("", "stop", Verdict(0.0, "wrong", None)),
        ("it is \\boxed{7}.", "length", Verdict(0.0, "wrong", "7")),
    ]
    with make_grader(config) as grader:
        found = grader.grade([(problem, text, finish_reason) for text, finish_reason, _ in rows])
    assert [(round(v.reward, 9), *v[1:]) for v in found] == [tuple(verdict) for *_, verdict in rows]


def test_the_table_is_as_large_as_the_page_says():
    (said,) = re.findall(r"More than (\d+) pairs", PAGE)
    assert len(TABLE + SURPRISING) > int(said)
