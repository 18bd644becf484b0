"""Engine = learner: the log-prob the engine reports for each token it sampled is the one the learner computes."""

from __future__ import annotations

from spiral_fast.trace import SEARCH
from spiral_fast.verify.log_probs import compare
from spiral_fast.verify.result import Result
from spiral_fast.verify.subject import Subject


def engine_is_learner(subject: Subject) -> Result:
    """Over search and aggregation traces of the run's own rollout, at its temperature."""
    n_aggregation = sum(trace.key.level != SEARCH for trace in subject.traces)
    note = f"{len(subject.traces) - n_aggregation} search and {n_aggregation} aggregation traces"
    learner = subject.learner.log_probs(subject.rows(subject.traces))
    return compare([trace.logp for trace in subject.traces], learner, subject.dtype, note)
