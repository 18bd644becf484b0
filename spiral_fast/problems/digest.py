"""Whether two runs draw from the same problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from spiral_fast.trace import Problem


def digest(problems: Iterable[Problem]) -> str:
    """sha256 over id, question and answer of every problem, in order."""
    content = hashlib.sha256()
    for problem in problems:
        content.update(json.dumps([problem.id, problem.question, problem.answer]).encode())
    return content.hexdigest()
