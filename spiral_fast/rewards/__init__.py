"""Rewards of completions: `make_grader(config)` gives the grader of a run's task."""

from spiral_fast.rewards.grader import (
    Grader,
    GraderFailed,
    NonFiniteReward,
    TooManyUngradable,
    Verdict,
    check_finite,
    check_ungradable,
    make_grader,
)

__all__ = [
    "Grader",
    "GraderFailed",
    "NonFiniteReward",
    "TooManyUngradable",
    "Verdict",
    "check_finite",
    "check_ungradable",
    "make_grader",
]
