"""Sharing invariance: computing a common prefix once does not change the gradient."""

from __future__ import annotations

from spiral_fast.verify.gradients import compare
from spiral_fast.verify.result import Result, not_applicable
from spiral_fast.verify.subject import Subject


def sharing_changes_nothing(subject: Subject) -> Result:
    """learner.sharing as configured against every row alone."""
    sharing = subject.config.learner.sharing
    if sharing == "none":
        return not_applicable("learner.sharing is none")
    rows, budget = subject.gradient_rows(), subject.config.learner.micro_batch_tokens
    shared = subject.gradient(rows, budget)
    alone = subject.gradient(rows, budget, sharing="none")
    return compare(shared, alone, subject.dtype, f"{len(rows)} rows, sharing {sharing} and none")
