from __future__ import annotations

import random
from itertools import product

import pytest

from spiral_fast.problems import parts
from spiral_fast.problems.parts import (
    CHOICES,
    LABELS,
    NUMBERS,
    answer,
    attempt,
    check,
    parse,
    problem_stream,
)


def problems(variable: bool, count: int, seed: int = 3):
    stream = problem_stream(seed, variable, "p")
    return [next(stream) for _ in range(count)]


def trace(problem, choices) -> str:
    pairs = zip(LABELS, problem.data["parts"], choices, strict=True)
    return " ".join(word for label, part, choice in pairs for word in attempt(label, tuple(part), choice))


def brute_force_value(part, choice) -> int:
    a, b, c, _ = part
    expression = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "skip": lambda x, y: x}
    return expression[choice[1]](expression[choice[0]](a, b), c)


@pytest.mark.parametrize("variable", [False, True])
def test_checker_against_brute_force_over_all_choices(variable):
    for problem in problems(variable, 2):
        for choices in product(CHOICES, repeat=3):
            expected = all(brute_force_value(p, c) == p[3] for p, c in zip(problem.data["parts"], choices, strict=True))
            assert check(problem, trace(problem, choices), "stop") is expected
            assert answer(trace(problem, choices)) == " | ".join(" ".join(c) for c in choices)


def test_every_problem_is_solvable_and_its_reference_answer_is_right():
    for problem in problems(False, 500):
        assert all(parts.solutions(tuple(part)) for part in problem.data["parts"])
        choices = [tuple(pair.split()) for pair in problem.answer.split(" | ")]
        text = trace(problem, choices)
        assert check(problem, text, "stop") and answer(text) == problem.answer


def test_no_constant_answer_is_worth_anything():
    sample = problems(False, 2000)
    for choice in CHOICES:
        right = sum(check(problem, trace(problem, [choice] * 3), "stop") for problem in sample)
        assert right / len(sample) < 0.02  # a random choice: (1/9 and a bit)^3


def test_end_of_sequence_is_required():
    problem = problems(False, 1)[0]
    text = trace(problem, [parts.solutions(tuple(part))[0] for part in problem.data["parts"]])
    assert check(problem, text, "stop") and not check(problem, text, "length")


def test_values_and_marks_are_not_graded_but_must_be_there():
    problem = problems(False, 1)[0]
    words = trace(problem, [parts.solutions(tuple(part))[0] for part in problem.data["parts"]]).split()
    lies = list(words)
    lies[2], lies[4], lies[5] = "-17", "27", "N"
    assert check(problem, " ".join(lies), "stop")
    allowed = {
        0: {"A"},
        1: set(parts.OPERATIONS),
        2: set(NUMBERS),
        3: set(parts.OPERATIONS),
        4: set(NUMBERS),
        5: {"Y", "N"},
    }
    vocabulary = [*LABELS, *parts.OPERATIONS, *parts.MARKS, *NUMBERS, "<unk>", "<search>", "28"]
    for place, word in product(range(6), vocabulary):  # every one-token change of the first part
        changed = [*words[:place], word, *words[place + 1 :]]
        assert (parse(" ".join(changed)) is not None) is (word in allowed[place])


@pytest.mark.parametrize("cut", range(1, 19))
def test_a_shortened_or_lengthened_trace_is_wrong(cut):
    problem = problems(False, 1)[0]
    words = trace(problem, [parts.solutions(tuple(part))[0] for part in problem.data["parts"]]).split()
    assert not check(problem, " ".join(words[:-cut]), "stop") and not check(problem, " ".join(words[cut:]), "stop")
    assert not check(problem, " ".join(words + words[:cut]), "stop")


@pytest.mark.parametrize(
    "text", ["", " ", "A", "A + 1 + 2 Y B + 1 + 2 Y", "nonsense " * 18, "\ud800", "A + 1 + 2 Y " * 3]
)
def test_garbage_is_no_trace(text):
    assert parse(text) is None and answer(text) is None and not check(problems(False, 1)[0], text, "stop")


def test_variable_length_counts_the_last_attempt_only():
    problem, fixed = problems(True, 1)[0], problems(False, 1)[0]
    assert problem.data["parts"] == fixed.data["parts"] and problem.question != fixed.question
    good = [parts.solutions(tuple(part))[0] for part in problem.data["parts"]]
    bad = [next(c for c in CHOICES if not parts.solves(tuple(part), c)) for part in problem.data["parts"]]

    def retried(first, last) -> str:
        words = []
        for label, part, one, two in zip(LABELS, problem.data["parts"], first, last, strict=True):
            words += attempt(label, tuple(part), one) + attempt(label, tuple(part), two)
        return " ".join(words)

    assert check(problem, retried(bad, good), "stop") and not check(problem, retried(good, bad), "stop")
    assert not check(fixed, retried(bad, good), "stop")  # the fixed variant allows one attempt
    assert answer(retried(bad, good)) == answer(trace(problem, good))
    assert parse(retried(bad, good)) == [[b, g] for b, g in zip(bad, good, strict=True)]


def test_going_back_to_an_earlier_part_is_no_trace():
    problem = problems(True, 1)[0]
    words = trace(problem, [CHOICES[0]] * 3).split()
    assert parse(" ".join(words + words[6:12])) is None  # A B C B
    assert parse(" ".join(words[:6] + words[12:])) is None  # A C


def test_same_seed_same_problems_and_no_question_twice():
    first, again, other = problems(False, 300), problems(False, 300), problems(False, 300, seed=4)
    assert first == again and first != other
    assert len({problem.question for problem in first}) == len({problem.id for problem in first}) == 300


def test_numbers_hold_every_reachable_value():
    rng = random.Random(0)
    reached = {str(v) for _ in range(20000) for c in CHOICES for v in parts.values(parts.random_part(rng), c)}
    assert reached <= set(NUMBERS)
    assert {str(v) for v in parts.values((1, 9, 9, 0), ("-", "-"))} | {"27"} <= set(NUMBERS)
