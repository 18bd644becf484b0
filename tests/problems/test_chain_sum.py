from __future__ import annotations

import ast
import sys
from itertools import islice

import pytest

from spiral_fast.config import ConfigError
from spiral_fast.problems.chain_sum import chain_sums, distinct_sums, sum_stream, terms_of

pytest.importorskip("reasoning_gym")


def python_value(node: ast.AST) -> int:
    """The expression's value by Python's own parser."""
    if isinstance(node, ast.Constant):
        return node.value
    left, right = python_value(node.left), python_value(node.right)
    return left + right if isinstance(node.op, ast.Add) else left - right


@pytest.mark.parametrize(("n_terms", "n_digits"), [(2, 1), (3, 1), (4, 2)])
def test_answers_are_exact(n_terms, n_digits):
    train, evaluation, _ = chain_sums(5, n_terms, n_digits, 100, 30)
    for problem in train + evaluation:
        expression = problem.data["expression"]
        assert (
            problem.answer
            == str(python_value(ast.parse(expression, mode="eval").body))
            == str(sum(terms_of(expression)))
        )
        assert f": {expression} =" in problem.question and len(terms_of(expression)) == n_terms
        assert all(
            len(term.lstrip("+-")) == n_digits for term in expression.replace(" ", "").replace("-", "+").split("+")
        )


def test_train_and_eval_share_no_question_and_none_occurs_twice():
    train, evaluation, passed_over = chain_sums(0, 2, 1, 150, 40)
    questions = [problem.question for problem in train + evaluation]
    assert len(set(questions)) == len(questions) == 190 and passed_over > 0
    assert len({problem.id for problem in train + evaluation}) == 190


def test_the_eval_set_does_not_depend_on_the_training_size():
    assert chain_sums(0, 2, 1, 10, 40)[1] == chain_sums(0, 2, 1, 100, 40)[1]


def test_the_whole_range_can_be_used_and_no_more():
    assert distinct_sums(2, 1) == 200 and distinct_sums(3, 2) == 90**3 * 4
    train, evaluation, _ = chain_sums(0, 2, 1, 180, 20)
    assert len({problem.question for problem in train + evaluation}) == 200
    with pytest.raises(ConfigError, match=r"problems.train_size: 181 .* 20 .* only 200 distinct"):
        chain_sums(0, 2, 1, 181, 20)


def test_streams_of_splits_and_seeds_differ():
    rows = {
        (split, seed): [p.question for p in islice(sum_stream(split, seed, 4, 3, 3), 50)]
        for split in ("eval", "train", "warm_start")
        for seed in (0, 1)
    }
    firsts = list(rows.values())
    for index, one in enumerate(firsts):
        for other in firsts[index + 1 :]:
            assert not set(one) & set(other)
    assert rows["eval", 0] == [p.question for p in islice(sum_stream("eval", 0, 4, 3, 3), 50)]


def test_no_constant_answer_is_worth_much():
    answers = [problem.answer for problem in chain_sums(0, 3, 1, 2000, 10)[0]]
    assert max(map(answers.count, set(answers))) / len(answers) < 0.12


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        chain_sums(0, 3, 1, 4, 4)
