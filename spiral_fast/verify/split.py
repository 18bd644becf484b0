"""Split invariance: the gradient does not depend on how the batch is cut into micro-batches."""

from __future__ import annotations

from spiral_fast.verify.gradients import compare
from spiral_fast.verify.result import Result
from spiral_fast.verify.subject import Subject


def split_changes_nothing(subject: Subject) -> Result:
    """One row at a time against all rows of a level at once."""
    rows = subject.gradient_rows()
    together = subject.gradient(rows, sum(row.computed_tokens for row in rows))
    alone = subject.gradient(rows, 1)
    return compare(alone, together, subject.dtype, f"{len(rows)} rows, one at a time and together")
