"""Supervised examples of the task `parts`: traces often wrong but always honest, and aggregations of them."""

from __future__ import annotations

import random
from typing import NamedTuple

from spiral_fast.problems.parts import CHOICES, LABELS, Choice, Part, attempt, problem_stream, solutions, solves
from spiral_fast.prompts.parts import PartsPrompts
from spiral_fast.trace import Problem

MORE = 0.2  # variable length: probability that one more attempt at the same part follows, whatever the mark was
MAX_ATTEMPTS = 3  # of a part in an example
RIGHT = 0.5  # share of the parts of a search example that are solutions by intent
CANDIDATE_RIGHT = (0.1, 0.8)  # range of that share over the sets of candidates

Example = tuple[list[int], list[int]]  # prompt ids, completion ids


class Mixture(NamedTuple):
    """How aggregation targets are made; the shares add up to 1."""

    copy: float  # one candidate as it is
    blind: float  # each part from a random candidate
    informed: float  # each part from a candidate whose part is right, if there is one


START = Mixture(copy=0.4, blind=0.3, informed=0.3)  # of the training of the built-in model ...
END = Mixture(copy=0.1, blind=0.1, informed=0.8)  # ... which moves from one to the other


def attempts_of(rng: random.Random, part: Part, final: Choice, variable_length: bool) -> list[Choice]:
    """The attempts at one part that end with `final`; earlier ones are random choices that do not count."""
    tried = [final]
    while variable_length and len(tried) < MAX_ATTEMPTS and rng.random() < MORE:
        tried.insert(0, rng.choice(solutions(part)) if rng.random() < 0.4 else rng.choice(CHOICES))
    return tried


def trace_words(rng: random.Random, problem: Problem, finals: list[Choice]) -> list[str]:
    words = []
    for label, part, final in zip(LABELS, problem.data["parts"], finals, strict=True):
        for choice in attempts_of(rng, tuple(part), final, problem.data["variable_length"]):
            words += attempt(label, tuple(part), choice)
    return words


def random_finals(rng: random.Random, problem: Problem, right: float) -> list[Choice]:
    """Per part, with probability `right` a random solution, else a random choice."""
    return [
        rng.choice(solutions(tuple(part))) if rng.random() < right else rng.choice(CHOICES)
        for part in problem.data["parts"]
    ]


def search_example(rng: random.Random, prompts: PartsPrompts, problem: Problem, right: float) -> Example:
    """(prompt ids, completion ids)."""
    words = trace_words(rng, problem, random_finals(rng, problem, right))
    return prompts.search(problem), prompts.completion(" ".join(words))


def aggregation_example(
    rng: random.Random, prompts: PartsPrompts, problem: Problem, set_size: int, right: float, mixture: Mixture
) -> Example:
    """(prompt ids, completion ids): `set_size` candidates of the accuracy `right`, and a target made from them."""
    finals = [random_finals(rng, problem, right) for _ in range(set_size)]
    candidates = [prompts.completion(" ".join(trace_words(rng, problem, final))) for final in finals]
    kind = rng.choices(Mixture._fields, mixture)[0]
    if kind == "copy":
        target = rng.choice(candidates)
    else:
        chosen = []
        for index, part in enumerate(problem.data["parts"]):
            options = [final[index] for final in finals]
            right_ones = [choice for choice in options if solves(tuple(part), choice)]
            chosen.append(rng.choice(right_ones if kind == "informed" and right_ones else options))
        target = prompts.completion(" ".join(trace_words(rng, problem, chosen)))
    return prompts.aggregation(problem, candidates), target


class PartsExamples:
    """Examples as `parts_model` ends with, from problems of their own, none of them in `exclude` (questions)."""

    def __init__(self, seed: int, variable_length: bool, set_size: int, prompts: PartsPrompts, exclude: set[str]):
        self.rng = random.Random(f"warm start/{seed}")
        stream = problem_stream(f"warm start {seed}", variable_length, "warm_start")
        self.stream = (problem for problem in stream if problem.question not in exclude)
        self.set_size = set_size
        self.prompts = prompts

    def search(self) -> Example:
        return search_example(self.rng, self.prompts, next(self.stream), RIGHT)

    def aggregation(self) -> Example:
        right = self.rng.uniform(*CANDIDATE_RIGHT)
        return aggregation_example(self.rng, self.prompts, next(self.stream), self.set_size, right, END)
