"""What the filters of a config take out of the training rows, each reason in words."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from spiral_fast.config import Config, FiltersConfig, RowCondition
from spiral_fast.interrupts import result_of
from spiral_fast.problems.rows import BadRow, Fields, Row, UniqueIds, number, problem_of, value_at
from spiral_fast.problems.same_text import normalised
from spiral_fast.trace import Problem


def kept_rows(rows: Iterable[Row], fields: Fields, filters: FiltersConfig, counts: Counter[str]) -> list[Problem]:
    """The rows that are problems and meet the conditions on fields. Every row taken out is counted by its reason.

    Raises BadRow for a row that is no problem, unless filters.bad_rows lets it go.
    """
    kept: list[Problem] = []
    ids, seen = UniqueIds(), set()
    for row in rows:
        counts["rows read"] += 1
        try:
            failed = next((_words(name, c) for name, c in filters.rows.items() if not _meets(row, name, c)), None)
            if failed:
                counts[f"taken out: not {failed}"] += 1
                continue
            problem = ids.add(row, problem_of(row, fields))
        except BadRow as error:
            if not filters.bad_rows:
                raise
            counts[f"taken out: {error.reason}"] += 1
            continue
        question = normalised(problem.question)
        if question in seen:
            if filters.duplicates:
                counts["taken out: an earlier row asks the same"] += 1
                continue
            counts["asked by an earlier row too"] += 1
        seen.add(question)
        kept.append(problem)
    return kept


def fitting_prompts(
    problems: list[Problem], prompts: Any, filters: FiltersConfig, counts: Counter[str]
) -> list[Problem]:
    """Those whose search prompt has a length within the filters' bounds, tokens."""
    unlimited = copy.copy(prompts)
    unlimited.max_prompt_tokens = sys.maxsize  # that limit refuses; here it is counted
    shortest, longest = filters.min_prompt_tokens or 0, filters.max_prompt_tokens or sys.maxsize
    kept = []
    for problem in problems:
        length = len(unlimited.search(problem))
        if length < shortest:
            counts[f"taken out: prompt below {shortest} tokens"] += 1
        elif length > longest:
            counts[f"taken out: prompt above {longest} tokens"] += 1
        else:
            kept.append(problem)
    return kept


def gradable(
    problems: list[Problem], config: Config, counts: Counter[str], progress: Callable[[int, int], None]
) -> list[Problem]:
    """Those whose reference answer, boxed, the run's own reward finds correct, asked in its grading processes."""
    from spiral_fast.rewards import make_grader

    kept = []
    with make_grader(config) as grader:  # all held at once: equal answers are graded once
        verdicts = [grader.submit(problem, f"\\boxed{{{problem.answer}}}", "stop") for problem in problems]
        for done, (problem, verdict) in enumerate(zip(problems, verdicts, strict=True), start=1):
            if result_of(verdict).verdict == "correct":
                kept.append(problem)
            else:
                counts["taken out: the reward does not accept the reference answer"] += 1
            progress(done, len(problems))
    return kept


def statement(filters: FiltersConfig) -> list[str]:
    """The filters in words, one sentence each."""
    said = [f"A row stays if {_words(name, condition)}." for name, condition in filters.rows.items()]
    if filters.bad_rows:
        said.append("Rows without a usable question, answer or id are taken out.")
    if filters.duplicates:
        said.append("Of rows with the same question (normalised text) the first stays.")
    if filters.min_prompt_tokens:
        said.append(f"The search prompt has at least {filters.min_prompt_tokens} tokens.")
    if filters.max_prompt_tokens:
        said.append(f"The search prompt has at most {filters.max_prompt_tokens} tokens.")
    if filters.answer_parses:
        said.append("The reward finds the reference answer itself, boxed, correct.")
    return said or ["Every row stays."]


def _meets(row: Row, name: str, condition: RowCondition) -> bool:
    if condition.one_of is not None and value_at(row, name) not in condition.one_of:
        return False
    if condition.min is None and condition.max is None:
        return True
    value = number(row, name)
    return (condition.min is None or value >= condition.min) and (condition.max is None or value <= condition.max)


def _words(name: str, condition: RowCondition) -> str:
    parts = []
    if condition.min is not None:
        parts.append(f"{name} >= {condition.min:g}")
    if condition.max is not None:
        parts.append(f"{name} <= {condition.max:g}")
    if condition.one_of is not None:
        parts.append(f"{name} one of {', '.join(map(str, condition.one_of))}")
    return " and ".join(parts)
