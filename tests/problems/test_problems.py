from __future__ import annotations

import json

import pytest

from spiral_fast.config import Config, ConfigError
from spiral_fast.problems import load_problems


def config(seed: int = 0, **problems) -> Config:
    return Config(run_dir="unused", seed=seed, model={"path": "builtin:parts"}, problems=problems)


@pytest.mark.parametrize("source", ["parts", "chain_sum"])
def test_generated_sets_are_disjoint_counted_and_seeded(source):
    if source == "chain_sum":
        pytest.importorskip("reasoning_gym")
    sets = load_problems(config(source=source, train_size=200, eval_size=30))
    assert sets.counts["train"] == len(sets.train) == 200 and sets.counts["eval"] == len(sets.eval) == 30
    assert not {p.question for p in sets.train} & {p.question for p in sets.eval}
    assert len({p.id for p in [*sets.train, *sets.eval]}) == 230
    again = load_problems(config(source=source, train_size=200, eval_size=30))
    assert (again.train, again.eval) == (sets.train, sets.eval)
    assert load_problems(config(seed=1, source=source, train_size=200, eval_size=30)).train != sets.train
    assert load_problems(config(source=source, train_size=100, eval_size=30)).eval == sets.eval


def write(path, questions):
    path.write_text("\n".join(json.dumps({"question": q, "answer": "1"}) for q in questions), encoding="utf-8")
    return str(path)


def test_jsonl_sets_count_the_evaluation_rows_that_are_not_used(tmp_path):
    train, evaluation = write(tmp_path / "train.jsonl", "abc"), write(tmp_path / "eval.jsonl", "defgh")
    sets = load_problems(config(source="jsonl", train_file=train, eval_file=evaluation, eval_size=3))
    assert [p.question for p in sets.train] == list("abc") and [p.question for p in sets.eval] == list("def")
    assert sets.counts == {"train": 3, "eval": 3, "eval_rows_not_used": 2}


def test_a_question_in_both_files_is_refused(tmp_path):
    train, evaluation = write(tmp_path / "train.jsonl", "abc"), write(tmp_path / "eval.jsonl", "dbe")
    with pytest.raises(
        ConfigError, match=r"eval.jsonl: 1 evaluation questions are training questions too .*'eval.jsonl:2'"
    ):
        load_problems(config(source="jsonl", train_file=train, eval_file=evaluation))
