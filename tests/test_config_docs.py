from __future__ import annotations

import re
from pathlib import Path

from spiral_fast.config import known_keys
from spiral_fast.config_docs import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"


def test_page_is_in_step_with_the_config():
    assert PAGE.read_text() == markdown(), "run: python -m spiral_fast.config_docs > docs/config.md"


def test_every_key_is_there_with_a_meaning():
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+?) \| (.+) \|$", markdown(), re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(known_keys())
    assert all(type_ and default and meaning for _, type_, default, meaning in rows)


def test_types_and_bounds():
    page = markdown()
    for row in (
        "| `learner.beta1` | number, >= 0, < 1 | `0.9` |",
        "| `learner.clip_norm` | number, > 0 or none | none |",
        "| `model.path` | text | required |",
        "| `credit.search_weight` | number, > 0 or `unbiased` | `1.0` |",
        "| `evaluate.pass_at` | list of integer, > 0 |",
    ):
        assert row in page
