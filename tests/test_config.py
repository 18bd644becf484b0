from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spiral_fast.config import Config, ConfigError, known_keys, load_config

CONFIGS = sorted(Path("configs").glob("*.yaml"))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config("configs/demo.yaml", list(overrides))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("configs/demo.yaml: ")
    return message.removeprefix("configs/demo.yaml: ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path):
    load_config(path)


def test_config_does_not_import_torch():
    code = "import sys, spiral_fast.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_field_is_described():
    def undescribed(section, prefix=""):
        for name, field in section.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undescribed(Config)) == []
    assert len(known_keys()) > 50


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("learner.stps=3", "learner.stps: unknown key; did you mean learner.steps?"),
        ("rollot.n_sets=3", "rollot: unknown key; did you mean rollout?"),
        ("n_search=3", "n_search: unknown key; did you mean rollout.n_search?"),
        ("learner.learning_rate=abc", "learner.learning_rate: 'abc' is not allowed: "),
        (
            "rollout.levels=[{n_sets: 4, set_size: 4, n_aggregations: 2, max_new_tokens: 24}, {n_sets: 4}]",
            "rollout.levels.set_size: entry 2: missing; n: traces in a set",
        ),
        (
            "rollout.levels=[{n_sets: 4, set_size: 4, n_aggregations: 2, max_new_tokens: 24, bogus: 1}]",
            "rollout.levels.bogus: entry 1: unknown key; did you mean rollout.levels.n_sets?",
        ),
        ("evaluate.pass_at=[1, x]", "evaluate.pass_at: entry 2: 'x' is not allowed: "),
        ("learner.learning_rate=.nan", "learner.learning_rate: nan is not allowed: "),
        ("learner.steps=-1", "learner.steps: -1 is not allowed: input should be greater than 0"),
        ("seed=1.5", "seed: 1.5 is not allowed: input should be a valid integer"),
        ("learner.steps=true", "learner.steps: True is not allowed: value error, a number is needed"),
        ("learner.learning_rate=true", "learner.learning_rate: True is not allowed: value error, a number is needed"),
        ("evaluate.pass_at=[]", "evaluate.pass_at: [] is not allowed: list should have at least 1 item"),
        ("run_dir=''", "run_dir: '' is not allowed: string should have at least 1 character"),
        ("credit=3", "credit: 3 is not allowed: "),
        ("seed=9999999999999999999999", "seed: 9999999999999999999999 is not allowed: input should be less than 9"),
        (
            "reward.timeout_s=1e300",
            "reward.timeout_s: '1e300' is not allowed: input should be less than or equal to",
        ),
        ("reward.memory_mb=99999999", "reward.memory_mb: 99999999 is not allowed: input should be less than or equal"),
        (
            "evaluate.bootstrap=1000000000",
            "evaluate.bootstrap: 1000000000 is not allowed: input should be less",
        ),
        ("threads=9999999999", "threads: 9999999999 is not allowed: input should be less than or equal to 1024"),
        (
            "problems.source=csv",
            "problems.source: 'csv' is not allowed: input should be 'jsonl', 'parquet', 'hub', 'reasoning_gym', "
            "'chain_sum' or 'parts'",
        ),
    ],
)
def test_one_line_names_key_value_and_what_is_allowed(override, start):
    assert refused(override).startswith(start)


def test_union_names_both_alternatives():
    message = refused("credit.search_weight=foo")
    assert "valid number" in message and "'unbiased'" in message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.lora.dropout=0.1"], "model.lora.dropout"),
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (["rollout.top_k=50"], "rollout.top_k"),
        (["rollout.min_p=0.1"], "rollout.min_p"),
        (["rollout.n_sets=1"], "rollout.n_sets"),
        (["rollout.set_size=8"], "rollout.set_size"),
        (["rollout.set_size=9"], "rollout.set_size"),
        (["rollout.n_aggregations=1"], "rollout.n_aggregations"),
        (["rollout.n_sets=71"], "rollout.n_sets"),
        (["rollout.set_sampler=balanced", "rollout.n_sets=3"], "rollout.set_sampler"),
        (["rollout.member_order=shared_first"], "rollout.member_order"),
        (["rollout.member_order=shared_first", "rollout.set_sampler=ordered"], "rollout.member_order"),
        (["credit.algorithm=grpo"], "rollout.n_sets"),
        (["credit.search_target_length=24"], "credit.search_target_length"),
        (
            ["credit.algorithm=grpo", "credit.search_weight=unbiased"]
            + [f"rollout.{key}=0" for key in ("n_sets", "set_size", "n_aggregations")],
            "credit.search_weight",
        ),
        (
            ["credit.algorithm=grpo", "credit.aggregation_target_length=10"]
            + [f"rollout.{key}=0" for key in ("n_sets", "set_size", "n_aggregations")],
            "credit.aggregation_target_length",
        ),
        (
            ["credit.algorithm=grpo", "rollout.set_sampler=balanced"]
            + [f"rollout.{key}=0" for key in ("n_sets", "set_size", "n_aggregations")],
            "rollout.set_sampler",
        ),
        (["rollout.n_search=1"], "rollout.n_search"),
        (["learner.kl_coef=0.1"], "learner.kl_coef"),
        (["learner.entropy_coef=0.1"], "learner.entropy_coef"),
        (["problems.source=jsonl"], "problems.train_file"),
        (["problems.source=chain_sum"], "problems.source"),
        (
            ["problems={source: jsonl, train_file: a, eval_file: b}", "model.path=m", "warm_start.steps=1"],
            "warm_start.steps",
        ),
        (["reward.kind=math"], "reward.kind"),
        (["rollout.n_search=200", "rollout.set_size=50"], "rollout.set_size"),
        (["evaluate.samples=32"], "evaluate.pass_at"),
        (["evaluate.rsa.set_size=9"], "evaluate.rsa.set_size"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_by_name(overrides, key):
    message = refused(*overrides)
    assert message.startswith(f"{key}: "), message
    assert "cannot be used: " in message


def test_ordered_allows_more_sets_than_uniform():
    assert load_config("configs/demo.yaml", ["rollout.set_sampler=ordered", "rollout.n_sets=71"])


def test_balanced_may_share_first():
    overrides = ["rollout.set_sampler=balanced", "rollout.member_order=shared_first"]
    assert load_config("configs/demo.yaml", overrides).rollout.member_order == "shared_first"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such file"),
        ("a: [1", "not valid YAML"),
        ("seed: 1\nmodel: {path: x}\nseed: 2\n", "not valid YAML (line 3: the key 'seed' is given twice)"),
        ("- 1\n- 2\n", "expected keys and values at the top level, found list"),
        ("", "expected keys and values at the top level, found NoneType"),
        ("problems: {source: parts}\nmodel: {path: x}\n", "run_dir: missing; folder the run is written to"),
        ("problems: {source: parts}\nrun_dir: x\n", "model: missing; a section of keys, for example model.path"),
        ("model: {path: x}\nrun_dir: x\n", "problems: missing; a section of keys, for example problems.source"),
        ("run_dir: 2026-13-45\n", "not valid YAML (month must be in 1..12)"),
        ("a: " + "[" * 5000, "not valid YAML (maximum recursion depth"),
        ("1: 2\nrun_dir: x\nmodel: {path: x}\nproblems: {source: parts}\n", "1: a key must be text"),
    ],
)
def test_bad_files(tmp_path, text, expected):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and expected in message and "\n" not in message


def test_merge_keys_give_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "run_dir: x\nmodel: {path: x}\nproblems: {source: parts}\n"
        "warm_start: &small {steps: 3, learning_rate: 0.5}\n"
        "learner: {<<: &deep {<<: *small, steps: 4}, beta1: 0.25}\n"
    )
    learner = load_config(path).learner
    assert (learner.steps, learner.learning_rate, learner.beta1) == (4, 0.5, 0.25)
    path.write_text(path.read_text().replace("steps: 4", "steps: 4, steps: 4"))
    with pytest.raises(ConfigError, match=r"line 5: the key 'steps' is given twice"):
        load_config(path)


@pytest.mark.parametrize("override", ["learner.steps", "=3", "seed.a=3", "seed=[1", "learner={steps: 1, steps: 2}"])
def test_bad_overrides(override):
    with pytest.raises(ConfigError) as error:
        load_config("configs/demo.yaml", [override])
    assert str(error.value).startswith(repr(override))


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config("configs/demo.yaml", ["run_dir=~/run", "model.adapter=~/adapter"])
    assert (config.run_dir, config.model.adapter) == ("/home/someone/run", "/home/someone/adapter")


def test_override_wins():
    assert load_config("configs/demo.yaml", ["learner.steps=7", "credit.search_weight=unbiased"]).learner.steps == 7
