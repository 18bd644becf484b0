"""Supervised examples for chain_sum: short worked sums, and aggregations that audit candidates, half of them wrong.

search        `4 - 3 = 1. 1 + 7 = 8. \\boxed{8}`
aggregation   `1 right, 2 wrong, 3 right, 4 wrong. 4 - 3 = 1. 1 + 7 = 8. \\boxed{8}`
"""

from __future__ import annotations

import random

from spiral_fast.problems.chain_sum import sum_stream, terms_of
from spiral_fast.trace import Problem

Example = tuple[list[int], list[int]]  # prompt ids, completion ids

WRONG = 0.5  # share of wrong candidates: the audit has to tell


def worked_sum(terms: list[int], slip: tuple[int, int] | None = None) -> tuple[str, int]:
    """(text, result). `slip` (step, error) adds an error to the result of one step; later steps follow from it."""
    steps = []
    total = terms[0]
    for index, term in enumerate(terms[1:]):
        before = total
        total += term + (slip[1] if slip and slip[0] == index else 0)
        steps.append(f"{before} {'-' if term < 0 else '+'} {abs(term)} = {total}.")
    return " ".join([*steps, f"\\boxed{{{total}}}"]), total


class ChainSumExamples:
    """Sums of 1 to n_digits + 1 digits from a stream of their own, none of them in `exclude` (questions)."""

    def __init__(self, seed: int, n_terms: int, n_digits: int, set_size: int, prompts, exclude: set[str]):
        self.rng = random.Random(f"warm start/{seed}")
        self.stream = (
            problem
            for problem in sum_stream("warm_start", seed, n_terms, 1, n_digits + 1)
            if problem.question not in exclude
        )
        self.set_size = set_size
        self.prompts = prompts

    def search(self) -> Example:
        problem = next(self.stream)
        return self.prompts.search(problem), self.prompts.completion(worked_sum(self._terms(problem))[0])

    def aggregation(self) -> Example:
        problem = next(self.stream)
        terms = self._terms(problem)
        candidates = [worked_sum(terms, self._slip(terms)) for _ in range(self.set_size)]
        text, result = worked_sum(terms)
        audit = ", ".join(
            f"{position} {'right' if claimed == result else 'wrong'}"
            for position, (_, claimed) in enumerate(candidates, start=1)
        )
        quoted = [self.prompts.completion(candidate) for candidate, _ in candidates]
        return self.prompts.aggregation(problem, quoted), self.prompts.completion(f"{audit}. {text}")

    def _slip(self, terms: list[int]) -> tuple[int, int] | None:
        if len(terms) < 2 or self.rng.random() >= WRONG:
            return None
        return self.rng.randrange(len(terms) - 1), self.rng.choice((-10, -2, -1, 1, 2, 10))

    def _terms(self, problem: Problem) -> list[int]:
        return terms_of(problem.data["expression"])
