"""Combinations of the section `problems` that cannot be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spiral_fast.config import ProblemsConfig


def problem_refusals(problems: ProblemsConfig) -> list[tuple[str, Any, str]]:
    """Key, value and reason of what cannot be read together."""
    found: list[tuple[str, Any, str]] = []
    source = problems.source
    needs = {"jsonl": "train_file", "parquet": "train_file", "hub": "hub.dataset", "reasoning_gym": "task"}.get(source)
    if needs == "hub.dataset":
        if problems.hub.dataset is None:
            found.append(("problems.hub.dataset", None, "source hub needs the name of a dataset"))
    elif needs and getattr(problems, needs) is None:
        found.append((f"problems.{needs}", None, f"source {source} needs a {needs.removeprefix('train_')}"))
    if source in ("reasoning_gym", "chain_sum", "parts"):
        for key in ("train_file", "eval_file", "hub", "eval_hub", "eval_fraction", "eval_fields", "filters"):
            value = getattr(problems, key)
            if value != type(problems).model_fields[key].default:
                value = value if isinstance(value, str | float) else value.model_dump(exclude_defaults=True)
                found.append((f"problems.{key}", value, f"source {source} generates its problems; remove it"))
    evaluation = [("problems.eval_file", problems.eval_file), ("problems.eval_hub.dataset", problems.eval_hub.dataset)]
    given = [(key, value) for key, value in evaluation if value is not None]
    if len(given) == 2:
        found.append((*given[1], "problems.eval_file is given too; remove one"))
    if given and problems.eval_fraction is not None:
        found.append(("problems.eval_fraction", problems.eval_fraction, f"{given[0][0]} is given; remove one"))
    for key, pattern in (
        ("answer_pattern", problems.answer_pattern),
        ("eval_fields.answer_pattern", problems.eval_fields.answer_pattern),
    ):
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                found.append((f"problems.{key}", pattern, f"not a regular expression ({error})"))
            else:
                if groups != 1:
                    found.append((f"problems.{key}", pattern, f"it has {groups} groups; put one around the answer"))
    shortest, longest = problems.filters.min_prompt_tokens, problems.filters.max_prompt_tokens
    if shortest and longest and shortest > longest:
        why = f"above problems.filters.max_prompt_tokens ({longest})"
        found.append(("problems.filters.min_prompt_tokens", shortest, why))
    for field, condition in problems.filters.rows.items():
        key, value = f"problems.filters.rows.{field}", condition.model_dump(exclude_none=True)
        if not value:
            found.append((key, value, "give min, max or one_of"))
        if condition.min is not None and condition.max is not None and condition.min > condition.max:
            found.append((key, value, "min is above max"))
    return found
