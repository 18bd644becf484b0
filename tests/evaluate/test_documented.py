"""docs/evaluation.md names every key that an evaluation writes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.evaluate.test_cross import sampled
from tests.evaluate.test_run import make_config, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text()


def names(value, skip=()) -> set[str]:
    """All keys at any depth, but numbers and `skip` (labels)."""
    if isinstance(value, list):
        return set().union(*(names(item, skip) for item in value))
    if not isinstance(value, dict):
        return set()
    own = {key for key in value if not key.isdigit() and key not in skip}
    return own.union(*(names(item, skip) for item in value.values()))


def documented(title: str) -> set[str]:
    section = PAGE.partition(f"## Keys of {title}")[2].partition("\n## ")[0]
    return {name for code in re.findall(r"`([^`]+)`", section) for name in re.split(r"[^a-z_0-9]+", code) if name}


def test_eval():
    config = make_config(lengths=[1], rsa=[{"steps": 1}, {"steps": 2, "population": 4, "set_size": 2}])
    written = names(run(config))
    assert written > {"verification", "budget", "few", "right_of_picked"} and written <= documented("eval.json")


def test_cross(tmp_path):
    config = make_config(rsa={"steps": 1, "population": 4, "set_size": 2})
    result = sampled(tmp_path, config, ["base", "up"], ["base", "up"])[0]
    assert names(result, ("base", "up")) <= documented("cross.json") | documented("eval.json")
