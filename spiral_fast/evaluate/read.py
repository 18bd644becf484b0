"""eval.json read back and checked key by key: the file may come from anywhere, and pages show what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from spiral_fast.config import ConfigError

Interval = tuple[FiniteFloat, FiniteFloat]
K = Annotated[str, Field(pattern=r"^[0-9]+$")]


class Part(BaseModel):
    """Keys that nobody reads are let through."""

    model_config = ConfigDict(strict=True)


class Share(Part):
    share: FiniteFloat | None
    of: int
    interval: Interval | None


class Cell(Part):
    aggregations: int
    few: bool


class ByRight(Cell):
    right: int
    correct: Share


class Mixed(Cell):
    picks_right: Share
    picks_wrong: Share
    new_answer: Share
    right_of_picked: Share
    chance: Share


class AllWrong(Cell):
    new_answer: Share
    correct: Share


class Verification(Part):
    by_right_candidates: list[ByRight]
    mixed: Mixed
    all_wrong: AllWrong


class AllSteps(Part):
    all_steps: Verification


class Shape(Part):
    population: int
    set_size: int
    rsa: list[FiniteFloat]
    intervals: list[Interval]
    verification: AllSteps


class Point(Part):
    method: str
    at: int
    generated: FiniteFloat
    prompt: FiniteFloat
    accuracy: FiniteFloat
    interval: Interval


class Row(Part):
    id: str
    pass_at_k: dict[K, FiniteFloat]
    majority_at_k: dict[K, FiniteFloat]
    lengths: dict[K, FiniteFloat]
    rsa_shapes: list[list[FiniteFloat]]


class Intervals(Part):
    level: FiniteFloat
    pass_at_k: dict[K, Interval]
    majority_at_k: dict[K, Interval]
    lengths: dict[K, Interval]


class Tokens(Part):
    generated: int
    prompt: int
    computed: int


class Stage(Part):
    mean_length: FiniteFloat


class Evaluation(Part):
    problems: int
    problems_digest: str
    samples: int
    pass_at_k: Annotated[dict[K, FiniteFloat], Field(min_length=1)]
    majority_at_k: dict[K, FiniteFloat]
    lengths: dict[K, FiniteFloat]
    rsa: list[FiniteFloat]
    rsa_shapes: list[Shape]
    distinct_answers: FiniteFloat
    search_entropy: FiniteFloat
    intervals: Intervals
    stages: Annotated[list[Stage], Field(min_length=1)]
    tokens: Tokens
    budget: list[Point]
    per_problem: Annotated[list[Row], Field(min_length=1)]


def read_evaluation(file: Path) -> dict[str, Any]:
    """What `evaluate` returned. Raises ConfigError for a file that is not, or no longer, what `eval` writes."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        evaluation = Evaluation.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(
            f"{file}: is not what spiral-fast eval writes today ({key}: {first['msg'].lower()}); evaluate again"
        ) from None
    if not all(_alike(evaluation, row) for row in evaluation.per_problem):
        raise ConfigError(f"{file}: is damaged (not every problem has every number); evaluate again")
    return found


def _alike(evaluation: Evaluation, row: Row) -> bool:
    """Whether a problem has the numbers whose means and intervals the evaluation has."""
    intervals, shapes = evaluation.intervals, evaluation.rsa_shapes
    return (
        row.pass_at_k.keys() == evaluation.pass_at_k.keys() == intervals.pass_at_k.keys()
        and row.majority_at_k.keys() == evaluation.majority_at_k.keys() == intervals.majority_at_k.keys()
        and row.lengths.keys() == evaluation.lengths.keys() == intervals.lengths.keys()
        and [len(values) for values in row.rsa_shapes]
        == [len(shape.rsa) for shape in shapes]
        == [len(shape.intervals) for shape in shapes]
    )
