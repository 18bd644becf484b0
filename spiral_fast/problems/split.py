"""Evaluation problems held out of the training rows where there is no evaluation set of its own."""

from __future__ import annotations

import hashlib

from spiral_fast.config import ConfigError
from spiral_fast.problems.same_text import normalised
from spiral_fast.trace import Problem


def hold_out(
    problems: list[Problem], seed: int, *, size: int | None = None, fraction: float | None = None
) -> tuple[list[Problem], list[Problem]]:
    """(train, eval), both in their order, chosen by a seeded hash of each question's normalised text.

    `fraction`: the questions whose hash lies below it; rows that are added or moved never change the side of another.
    `size`: those with the smallest hashes; of n added rows, at most n others change sides. Rows with the same question
    stay together, so that there may be a few more than `size`. Raises ConfigError when a side is empty.
    """
    keys = [_uniform(seed, normalised(problem.question)) for problem in problems]
    if fraction is None:
        ordered = sorted(keys)
        limit = ordered[size - 1] if size <= len(keys) else 1.0
    else:
        limit = fraction
    held = [key <= limit if fraction is None else key < limit for key in keys]
    train = [problem for problem, out in zip(problems, held, strict=True) if not out]
    evaluation = [problem for problem, out in zip(problems, held, strict=True) if out]
    asked = f"eval_fraction: {fraction}" if size is None else f"eval_size: {size}"
    if not train or not evaluation:
        side = "training" if not train else "evaluation"
        raise ConfigError(f"problems.{asked} of {len(problems)} problems leaves no {side} problem; change it")
    return train, evaluation


def _uniform(seed: int, text: str) -> float:
    """In [0, 1), a function of both alone."""
    digest = hashlib.sha256(f"held out/{seed}/".encode() + text.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
