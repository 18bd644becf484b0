from __future__ import annotations

import pytest
import yaml

from spiral_fast.config import Config, ConfigError, load_config, refusals

JSONL = {"source": "jsonl", "train_file": "t"}


def first_refusal(tmp_path, problems) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run_dir": "x", "model": {"path": "m"}, "problems": problems}))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("problems", "says"),
    [
        ({"source": "jsonl"}, "problems.train_file: None cannot be used: source jsonl needs a file"),
        ({"source": "parquet"}, "problems.train_file: None cannot be used: source parquet needs a file"),
        ({"source": "hub"}, "problems.hub.dataset: None cannot be used: source hub needs the name of a dataset"),
        ({"source": "reasoning_gym"}, "problems.task: None cannot be used: source reasoning_gym needs a task"),
        (
            JSONL | {"eval_file": "e", "eval_hub": {"dataset": "d"}},
            "problems.eval_hub.dataset: 'd' cannot be used: problems.eval_file is given too; remove one",
        ),
        (
            JSONL | {"eval_file": "e", "eval_fraction": 0.1},
            "problems.eval_fraction: 0.1 cannot be used: problems.eval_file is given; remove one",
        ),
        (JSONL | {"eval_fraction": 1}, "problems.eval_fraction: 1 is not allowed: input should be less than 1"),
        (JSONL | {"answer_pattern": "#### .+"}, "it has 0 groups; put one around the answer"),
        (JSONL | {"answer_pattern": "(a)(b)"}, "it has 2 groups; put one around the answer"),
        (JSONL | {"answer_pattern": "(a"}, "problems.answer_pattern: '(a' cannot be used: not a regular expression"),
        (
            JSONL | {"eval_fields": {"answer_pattern": "a"}},
            "problems.eval_fields.answer_pattern: 'a' cannot be used: it has 0 groups",
        ),
        (
            JSONL | {"filters": {"min_prompt_tokens": 9, "max_prompt_tokens": 8}},
            "problems.filters.min_prompt_tokens: 9 cannot be used: above problems.filters.max_prompt_tokens (8)",
        ),
        (
            JSONL | {"filters": {"rows": {"level": {}}}},
            "problems.filters.rows.level: {} cannot be used: give min, max or one_of",
        ),
        (JSONL | {"filters": {"rows": {"level": {"min": 2, "max": 1}}}}, "cannot be used: min is above max"),
        (JSONL | {"filters": {"rows": {"level": {"minimum": 2}}}}, "problems.filters.rows.level.minimum: unknown key"),
        (JSONL | {"filters": {"rows": {"level": {"min": "a"}}}}, "problems.filters.rows: 'a' is not allowed"),
        (JSONL | {"contaminated": "ignore"}, "problems.contaminated: 'ignore' is not allowed"),
        (
            {"source": "chain_sum", "filters": {"duplicates": True}},
            "problems.filters: {'duplicates': True} cannot be used: source chain_sum generates its problems; remove it",
        ),
        ({"source": "parts", "train_file": "t"}, "problems.train_file: 't' cannot be used: source parts generates"),
        ({"source": "chain_sum", "eval_fraction": 0.5}, "problems.eval_fraction: 0.5 cannot be used: source chain_sum"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, problems, says):
    said = first_refusal(tmp_path, problems)
    assert says in said and "\n" not in said


def test_a_resolved_config_is_read_again():
    """A run stores every value in force; none of them may be refused when it is resumed."""
    for problems in (
        JSONL | {"eval_fraction": 0.1, "filters": {"rows": {"a": {"one_of": ["x", 1]}, "b": {"min": 0}}}},
        {"source": "hub", "hub": {"dataset": "d"}, "eval_hub": {"dataset": "d", "split": "test"}},
        {"source": "reasoning_gym", "task": "gcd", "task_settings": {"max_value": 5, "nested": {"a": [1, 2]}}},
        {"source": "chain_sum"},
    ):
        config = Config(run_dir="x", model={"path": "m"}, problems=problems)
        assert refusals(config) == []
        again = Config(**yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
        assert again == config and refusals(again) == []


@pytest.mark.parametrize("source", ["jsonl", "parquet", "hub", "reasoning_gym"])
def test_there_is_no_warm_start_without_templated_answers(source):
    problems = {"source": source, "train_file": None, "hub": {}}
    if source in ("jsonl", "parquet"):
        problems["train_file"] = "t"
    elif source == "hub":
        problems["hub"] = {"dataset": "d"}
    else:
        problems["task"] = "gcd"
    config = Config(run_dir="x", model={"path": "m"}, problems=problems, warm_start={"steps": 5})
    assert refusals(config) == [
        f"warm_start.steps: 5 cannot be used: there are no templated answers for problems.source: {source}; set it to 0"
    ]
