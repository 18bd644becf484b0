from __future__ import annotations

import json

import pytest

from spiral_fast.config import Config, ConfigError
from spiral_fast.problems import load_problems


def config(seed: int = 0, **problems) -> Config:
    return Config(run_dir="unused", seed=seed, model={"path": "builtin:parts"}, problems=problems)


@pytest.mark.parametrize("source", ["parts", "chain_sum", "reasoning_gym"])
def test_generated_sets_are_disjoint_counted_and_seeded(source):
    more = {}
    if source != "parts":
        pytest.importorskip("reasoning_gym")
    if source == "reasoning_gym":
        more = {"task": "countdown", "task_settings": {"min_numbers": 3, "max_numbers": 3}}
    sets = load_problems(config(source=source, train_size=200, eval_size=30, **more))
    assert sets.counts["train"] == len(sets.train) == 200 and sets.counts["eval"] == len(sets.eval) == 30
    assert not {p.question for p in sets.train} & {p.question for p in sets.eval}
    assert len({p.id for p in [*sets.train, *sets.eval]}) == 230
    again = load_problems(config(source=source, train_size=200, eval_size=30, **more))
    assert (again.train, again.eval) == (sets.train, sets.eval)
    assert load_problems(config(seed=1, source=source, train_size=200, eval_size=30, **more)).train != sets.train
    assert load_problems(config(source=source, train_size=100, eval_size=30, **more)).eval == sets.eval


def write(path, questions, **more):
    path.write_text("\n".join(json.dumps({"question": q, "answer": "1"} | more) for q in questions), encoding="utf-8")
    return str(path)


def test_rows_of_an_evaluation_file_that_are_not_used_are_counted(tmp_path):
    train, evaluation = write(tmp_path / "train.jsonl", "abc"), write(tmp_path / "eval.jsonl", "defgh")
    sets = load_problems(config(source="jsonl", train_file=train, eval_file=evaluation, eval_size=3))
    assert [p.question for p in sets.train] == list("abc") and [p.question for p in sets.eval] == list("def")
    counts = {"rows read": 3, "evaluation rows read": 5, "evaluation rows not used": 2, "train": 3, "eval": 3}
    assert sets.counts == counts


def test_without_an_evaluation_file_problems_are_held_out(tmp_path):
    train = write(tmp_path / "train.jsonl", [f"question {i}" for i in range(50)])
    sets = load_problems(config(source="jsonl", train_file=train, eval_size=10))
    assert sets.counts == {"rows read": 50, "held out of them": 10, "train": 40, "eval": 10}
    assert sorted(p.question for p in [*sets.train, *sets.eval]) == sorted(f"question {i}" for i in range(50))


def test_the_evaluation_rows_may_have_other_keys_and_another_format(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"problem": ["x"], "final": ["so\n#### 7"]}), tmp_path / "eval.parquet")
    fields = {"question": "problem", "answer": "final", "answer_pattern": "#### (.+)"}
    train = write(tmp_path / "train.jsonl", "ab")
    source = dict(source="jsonl", train_file=train, eval_file=str(tmp_path / "eval.parquet"), eval_fields=fields)
    assert [(p.id, p.question, p.answer) for p in load_problems(config(**source)).eval] == [
        ("eval.parquet:0", "x", "7")
    ]


def test_filters_do_not_touch_an_evaluation_file(tmp_path):
    train, evaluation = write(tmp_path / "t.jsonl", "ab", level=1), write(tmp_path / "e.jsonl", "cd", level=9)
    filters = {"rows": {"level": {"max": 1}}}
    sets = load_problems(config(source="jsonl", train_file=train, eval_file=evaluation, filters=filters))
    assert (len(sets.train), len(sets.eval)) == (2, 2)


def test_filters_that_leave_nothing_say_why(tmp_path):
    train = write(tmp_path / "t.jsonl", "ab", level=1)
    with pytest.raises(ConfigError, match=r"problems.filters: no training problem is left .*not level >= 2 2"):
        load_problems(config(source="jsonl", train_file=train, filters={"rows": {"level": {"min": 2}}}))
