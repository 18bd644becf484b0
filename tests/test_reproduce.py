"""docs/reproduce.md: its values are the config's, both configs sample as much, its commands can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spiral_fast.config import Config, known_keys, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reproduce.md").read_text()
SPIRAL, GRPO = (load_config(ROOT / "configs" / f"paper_{name}qwen3_4b.yaml") for name in ("", "grpo_"))


def value(config: Config, key: str):
    for part in key.split("."):
        if isinstance(config, list):  # of sections
            config = config[0] if config else None
        config = getattr(config, part, None)
    return config


def test_every_value_is_the_configs():
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| (\S+) \| .+ \|$", PAGE, re.MULTILINE)
    assert len(rows) > 30
    for key, stated in rows:
        assert str(value(SPIRAL, key)) == stated, key


def test_every_value_of_the_config_that_is_no_default_is_explained():
    default = Config.model_validate({"run_dir": "-", "model": {"path": "-"}, "problems": {"source": "jsonl"}})
    other = {
        key for key in known_keys() if value(SPIRAL, key) != value(default, key) and not key.startswith("problems.")
    }
    assert {key for key in other - {"run_dir"} if f"`{key}`" not in PAGE} == set()


def test_both_sample_as_much():
    s, g = SPIRAL.rollout, GRPO.rollout
    ceiling = s.n_search * s.search_max_new_tokens + s.n_sets * s.n_aggregations * s.aggregation_max_new_tokens
    assert ceiling == g.n_search * g.search_max_new_tokens == 98_304 and g.n_sets == 0
    assert GRPO.credit.search_target_length / g.search_max_new_tokens == 3072 / 4096
    for section in ("model", "problems", "batch", "learner", "reward", "evaluate", "seed"):
        assert getattr(SPIRAL, section) == getattr(GRPO, section), section


@pytest.mark.parametrize(
    "command",
    re.findall(r"^spiral-fast (?:eval|train|doctor) (?:\\\n|[^#\n])*", PAGE, re.MULTILINE),
)
def test_commands_can_be_typed(command):
    words = shlex.split(command.replace("\\\n", " "))[2:]
    config, *rest = [word for word in words if word.endswith(".yaml") or ("=" in word and not word.startswith("-"))]
    load_config(ROOT / config, rest)
