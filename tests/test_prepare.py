from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import Config, load_config
from spiral_fast.prepare_command import prepare as prepare_files
from spiral_fast.problems import load_problems

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def write_rows(path, n=40):
    rows = [
        {"problem": f"What is {i} + {i}?", "answer": str(2 * i), "difficulty": f"{i % 8}/8", "id": "x"}
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(tmp_path, out="prepared", **problems):
    write_rows(tmp_path / "rows.jsonl")
    source = {
        "source": "jsonl",
        "train_file": str(tmp_path / "rows.jsonl"),
        "question_field": "problem",
        "eval_size": 5,
    }
    config = {"run_dir": "unused", "model": {"path": "unused"}, "problems": source | problems}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "run.yaml"), "--out", str(tmp_path / out)])
    return result, load_config(tmp_path / "run.yaml") if result.exit_code == 0 else None


def test_the_files_are_the_problems_of_the_config(tmp_path):
    result, config = prepare(tmp_path, filters={"rows": {"difficulty": {"min": 0.125, "max": 0.875}}})
    assert result.exit_code == 0, result.output
    out, sets = tmp_path / "prepared", load_problems(config)
    assert sorted(path.name for path in out.iterdir()) == ["counts.json", "eval.jsonl", "train.jsonl"]
    assert not list(tmp_path.glob(".*.tmp"))
    snippet = yaml.safe_load(result.output[result.output.index("problems: {") :])["problems"]
    again = load_problems(Config(run_dir="unused", model={"path": "unused"}, problems=snippet))
    for one, other in ((sets.train, again.train), (sets.eval, again.eval)):
        assert [(p.id, p.question, p.answer) for p in one] == [(p.id, p.question, p.answer) for p in other]
        assert [{"id_of_source": p.data["id"], "difficulty": p.data["difficulty"]} for p in one] == [
            p.data for p in other
        ]
    counts = json.loads((out / "counts.json").read_text())
    assert (
        counts["counts"] == sets.counts
        and counts["counts"]["taken out: not difficulty >= 0.125 and difficulty <= 0.875"] == 5
    )
    assert counts["inputs"]["train"]["sha256"] == hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    assert counts["filter"] == ["A row stays if difficulty >= 0.125 and difficulty <= 0.875."]
    assert (
        counts["evaluation"]
        == "Held out after the filter: 5 problems, by a hash of the normalised question with seed 0."
    )
    for line in (" 5  taken out: not difficulty >= 0.125", "30  train", " 5  eval", "filter: A row stays if"):
        assert line in result.output


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path):
    assert prepare(tmp_path)[0].exit_code == 0
    before = (tmp_path / "prepared" / "train.jsonl").read_bytes()
    result, _ = prepare(tmp_path, filters={"rows": {"difficulty": {"min": 0.5}}})
    assert result.exit_code == 2 and "exists already; choose another folder" in result.output
    assert (tmp_path / "prepared" / "train.jsonl").read_bytes() == before
    result, _ = prepare(tmp_path, out="other", answer_field="missing")
    assert result.exit_code == 2 and "rows.jsonl:1: the field 'missing' is missing" in result.output
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".*.tmp"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    result, _ = prepare(tmp_path, out="link")
    assert result.exit_code == 2 and "exists already; choose another folder" in result.output


def test_what_a_killed_process_left_aside_is_in_nobodys_way(tmp_path):
    (tmp_path / ".prepared.tmp").mkdir()
    (tmp_path / ".prepared.tmp" / "junk").touch()
    assert prepare(tmp_path)[0].exit_code == 0
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == [
        "counts.json",
        "eval.jsonl",
        "train.jsonl",
    ]


def test_generated_tasks_have_nothing_to_prepare(tmp_path):
    (tmp_path / "run.yaml").write_text("run_dir: x\nmodel: {path: x}\nproblems: {source: chain_sum}\n")
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "there is nothing to prepare" in result.output and not (tmp_path / "out").exists()


def test_lengths_are_counted_with_the_tokenizer_of_the_config_and_no_model(tmp_path):
    tokenizer = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "llama"}')
    rows = [{"question": "word " * n, "answer": "x"} for n in (1, 50, 100, 200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "jsonl", "train_file": str(tmp_path / "rows.jsonl"), "eval_size": 1}
    problems = source | {"filters": {"min_prompt_tokens": 30, "max_prompt_tokens": 150}}
    config = Config(
        run_dir="x", model={"path": str(tmp_path / "tokenizer")}, problems=problems, rollout={"max_prompt_tokens": 1}
    )
    prepare_files(config, tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "counts.json").read_text())["counts"]
    assert counts["taken out: prompt below 30 tokens"] == counts["taken out: prompt above 150 tokens"] == 1
    kept = (tmp_path / "out" / "train.jsonl").read_text() + (tmp_path / "out" / "eval.jsonl").read_text()
    assert sorted(json.loads(line)["id"] for line in kept.splitlines()) == ["rows.jsonl:2", "rows.jsonl:3"]


def test_the_polaris_recipe_on_rows_of_its_shape(tmp_path, monkeypatch):
    """The hub's names replaced by folders in the same format."""
    pytest.importorskip("math_verify")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    rows = [{"problem": f"Find {i}+{i}.", "answer": str(2 * i), "difficulty": f"{i % 9}/8"} for i in range(18)]
    rows += [{"problem": "find 1 + 1", "answer": "2", "difficulty": "1/8"}]  # again
    rows += [
        {"problem": "broken", "answer": "\\frac{", "difficulty": "1/8"},
        {"problem": "Q?", "answer": "7", "difficulty": "4/8"},
    ]
    for name, split, content in (
        ("polaris", "train", rows),
        ("aime", "test", [{"problem": "q", "answer": "7", "id": "0"}]),
    ):
        (tmp_path / name).mkdir()
        datasets.Dataset.from_list(content).to_parquet(str(tmp_path / name / f"{split}-00000-of-00001.parquet"))
    overrides = [f"problems.hub.dataset={tmp_path / 'polaris'}", f"problems.eval_hub.dataset={tmp_path / 'aime'}"]
    overrides += ["problems.filters.max_prompt_tokens=null", "reward.workers=1"]
    arguments = ["prepare", str(CONFIGS / "prepare_polaris.yaml"), *overrides, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    account = json.loads((tmp_path / "out" / "counts.json").read_text())
    assert account["counts"] == {
        "rows read": 21,
        "taken out: not difficulty >= 0.125 and difficulty <= 0.875": 4,
        "taken out: an earlier row asks the same": 1,
        "taken out: the reward does not accept the reference answer": 1,
        "evaluation rows read": 1,
        "evaluation rows not used": 0,
        "taken out: an evaluation problem asks the same": 1,
        "train": 14,
        "eval": 1,
    }
    assert len(account["inputs"]["train"]["sha256 of rows"]) == 64
