"""The user's own reward, `reward.function`, in grading processes; see docs/rewards.md."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future

from spiral_fast.config import RewardConfig
from spiral_fast.rewards.boxed import boxed_answer
from spiral_fast.rewards.pool import PoolGrader, Verdict
from spiral_fast.trace import Problem


class FunctionGrader(PoolGrader):
    """Calls `function` with (question, answer, completion, finish_reason, data).

    `function`: a dotted name or `path/to/file.py:name`. Entering the grader raises ConfigError when it cannot be
    loaded. Equal are gradings with equal arguments.
    """

    def __init__(self, config: RewardConfig, function: str):
        place = function.rpartition(":")[0] or function.rpartition(".")[0]
        trial = [place] if place.endswith(".py") else ["-c", f"import {place}"]
        super().__init__(config, {"kind": "function", "function": function}, trial, config.correct_at)

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        """Raises TypeError, naming the problem, when its data is more than JSON can hold."""
        request = [problem.question, problem.answer, text, finish_reason, problem.data]
        try:
            key = hashlib.blake2b(json.dumps(request).encode()).digest()  # a completion may be long
        except TypeError as error:
            raise TypeError(f"the data of the problem {problem.id!r} cannot go to a grading process: {error}") from None
        return self._submit(key, request, boxed_answer(text))
