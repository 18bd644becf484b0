"""Whether two runs have the same problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from spiral_fast.trace import Problem


def digest(problems: Iterable[Problem]) -> str:
    """sha256 over every problem, in order, with the data that a reward may read."""
    content = hashlib.sha256()
    for problem in problems:
        content.update(json.dumps([problem.id, problem.question, problem.answer, problem.data]).encode())
    return content.hexdigest()
