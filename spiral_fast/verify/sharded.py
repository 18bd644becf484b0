"""FSDP = plain: the sharded model has the gradient of the whole one."""

from __future__ import annotations

from spiral_fast.learner.learner import Learner
from spiral_fast.verify.gradients import compare
from spiral_fast.verify.result import Result, not_applicable
from spiral_fast.verify.subject import Subject


def fsdp_is_plain(subject: Subject) -> Result:
    """Shards the subject's model in place and samples anew: what is checked after this runs as the run would."""
    if not subject.config.learner.fsdp:
        return not_applicable("learner.fsdp is false")
    rows, budget = subject.gradient_rows(), subject.config.learner.micro_batch_tokens
    plain = subject.gradient(rows, budget)
    settings = subject.config.learner.model_copy(update={"self_check": False})
    subject.learner = Learner(subject.config.model_copy(update={"learner": settings}), subject.loaded)
    sharded = subject.gradient(rows, budget)
    subject.sample_traces()
    return compare(sharded, plain, subject.dtype, f"{len(rows)} rows, world size 1")
