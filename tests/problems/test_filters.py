from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_fast.config import Config, ConfigError, FiltersConfig
from spiral_fast.problems import load_problems
from spiral_fast.problems.filters import fitting_prompts, gradable, kept_rows, statement
from spiral_fast.problems.rows import Fields, Row
from spiral_fast.trace import Problem


def rows(*values):
    return [
        Row(f"f.jsonl:{i}", f"f:{i}", {"question": f"q{i}", "answer": "a"} | v) for i, v in enumerate(values, start=1)
    ]


def kept(filters, *values):
    counts = Counter()
    return [p.id for p in kept_rows(rows(*values), Fields(), FiltersConfig(**filters), counts)], counts


def test_conditions_on_fields():
    levels = [{"level": f"{i}/8"} for i in range(9)]
    ids, counts = kept({"rows": {"level": {"min": 0.125, "max": 0.875}}}, *levels)
    assert ids == [f"f:{i}" for i in range(2, 9)]
    assert counts == {"rows read": 9, "taken out: not level >= 0.125 and level <= 0.875": 2}
    ids, counts = kept({"rows": {"level": {"one_of": ["1/8", "2/8"]}}}, *levels)
    assert ids == ["f:2", "f:3"] and counts["taken out: not level one of 1/8, 2/8"] == 7
    nested = [{"x": {"year": 2024}}, {"x": {"year": 2025}}]
    assert kept({"rows": {"x.year": {"one_of": [2025]}}}, *nested)[0] == ["f:2"]


BAD = [
    ({"answer": None}, "the field 'answer' must be a string"),
    ({"answer": " "}, "the field 'answer' is empty"),
    ({"question": ""}, "the field 'question' is empty"),
    ({"question": "\ud800"}, "the field 'question' holds a lone surrogate"),
    ({"level": "hard"}, "the field 'level' is no number"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_row_stops_the_run_unless_a_filter_lets_it_go(bad, reason):
    conditions = {"rows": {"level": {"min": 0}}}
    values = [{"level": 1}, {"level": 1} | bad, {"level": 1}]
    with pytest.raises(ConfigError) as error:
        kept(conditions, *values)
    assert str(error.value).startswith(f"f.jsonl:2: {reason}")
    ids, counts = kept(conditions | {"bad_rows": True}, *values)
    assert ids == ["f:1", "f:3"] and counts == {"rows read": 3, f"taken out: {reason}": 1}


def test_duplicates_are_counted_and_taken_out_only_when_asked():
    values = [{"question": "What is 1+1?"}, {"question": "what is 1 + 1"}, {"question": "other"}]
    assert kept({}, *values) == (["f:1", "f:2", "f:3"], {"rows read": 3, "asked by an earlier row too": 1})
    assert kept({"duplicates": True}, *values) == (
        ["f:1", "f:3"],
        {"rows read": 3, "taken out: an earlier row asks the same": 1},
    )


@settings(max_examples=50)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"question": st.sampled_from(["a", "A?", "b", ""]), "level": st.sampled_from([1, 2, "x"])}
        )
    ),
    st.booleans(),
)
def test_every_row_is_kept_or_counted(values, duplicates):
    ids, counts = kept({"bad_rows": True, "duplicates": duplicates, "rows": {"level": {"max": 1}}}, *values)
    taken_out = sum(count for name, count in counts.items() if name.startswith("taken out"))
    assert len(ids) + taken_out == len(values) == counts["rows read"]


class Words:
    """Prompts of as many tokens as the question has letters."""

    max_prompt_tokens = 3

    def search(self, problem):
        assert len(problem.question) <= self.max_prompt_tokens, "the run's own limit must not stop the filter"
        return [0] * len(problem.question)


def test_prompt_lengths():
    problems, counts, prompts = [Problem(q, q, "a") for q in ("a", "bb", "ccc", "dddd")], Counter(), Words()
    filters = FiltersConfig(min_prompt_tokens=2, max_prompt_tokens=3)
    assert [p.id for p in fitting_prompts(problems, prompts, filters, counts)] == ["bb", "ccc"]
    assert counts == {"taken out: prompt below 2 tokens": 1, "taken out: prompt above 3 tokens": 1}
    assert prompts.max_prompt_tokens == 3


def config(**problems) -> Config:
    return Config(run_dir="unused", model={"path": "builtin:parts"}, reward={"timeout_s": 5}, problems=problems)


def test_answers_that_the_reward_cannot_read():
    pytest.importorskip("math_verify")
    answers = {"5": True, "\\frac{1}{2}": True, "(1,2)": True, "}": False, "\\frac{": False, "9^{9^{9^9}}": None}
    problems, counts, seen = [Problem(a, "q", a) for a in answers], Counter(), []
    stay = {
        p.id for p in gradable(problems, config(source="jsonl", train_file="x"), counts, lambda *at: seen.append(at))
    }
    assert all((answer in stay) is wanted for answer, wanted in answers.items() if wanted is not None)
    assert counts == {"taken out: the reward does not accept the reference answer": len(answers) - len(stay)}
    assert seen == [(done, len(answers)) for done in range(1, len(answers) + 1)]


def test_the_filters_of_a_file_run_in_turn(tmp_path):
    answers = ["1", "}", "2", "3", "4", "5"]
    values = [{"question": "x" * (i + 1), "answer": a, "level": i} for i, a in enumerate(answers)]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
    filters = dict(rows={"level": {"max": 4}}, max_prompt_tokens=4, answer_parses=True)
    prompts = Words()
    sets = load_problems(
        config(source="jsonl", train_file=str(tmp_path / "f.jsonl"), filters=filters, eval_size=1), lambda: prompts
    )
    assert sets.counts == {
        "rows read": 6,
        "taken out: not level <= 4": 1,
        "taken out: prompt above 4 tokens": 1,
        "taken out: the reward does not accept the reference answer": 1,
        "held out of them": 1,
        "train": 2,
        "eval": 1,
    }


def test_the_statement_says_every_filter():
    said = statement(
        FiltersConfig(
            rows={"difficulty": {"min": 0.125}, "kind": {"one_of": ["a", "b"]}},
            min_prompt_tokens=2,
            max_prompt_tokens=9,
            answer_parses=True,
            duplicates=True,
            bad_rows=True,
        )
    )
    assert said == [
        "A row stays if difficulty >= 0.125.",
        "A row stays if kind one of a, b.",
        "Rows without a usable question, answer or id are taken out.",
        "Of rows with the same question (normalised text) the first stays.",
        "The search prompt has at least 2 tokens.",
        "The search prompt has at most 9 tokens.",
        "The reward finds the reference answer itself, boxed, correct.",
    ]
    assert statement(FiltersConfig()) == ["Every row stays."]
