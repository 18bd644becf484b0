"""Mathematical answers by math-verify, in grading processes.

math-verify's own time-outs are signals, which only work in the main thread and not inside one long C call; here they
are off. The rule: the last box of the completion (boxed.py) is compared with the reference answer; no box, or an empty
one, is wrong. The finish reason plays no part.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future

from spiral_fast.config import ConfigError, RewardConfig
from spiral_fast.install import install_command
from spiral_fast.rewards.boxed import boxed_answer
from spiral_fast.rewards.grader import known
from spiral_fast.rewards.pool import PoolGrader, Verdict
from spiral_fast.trace import Problem


class MathGrader(PoolGrader):
    """Raises ConfigError without math-verify. Equal are gradings with the same reference and the same answer."""

    def __init__(self, config: RewardConfig):
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"reward.kind: 'math' needs math-verify; run: {install_command('train')}")
        super().__init__(config, {"kind": "math"}, ["-c", "import math_verify"])

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        answer = boxed_answer(text)
        return (
            known(False, None)
            if answer is None
            else self._submit((problem.answer, answer), [problem.answer, answer], answer)
        )
