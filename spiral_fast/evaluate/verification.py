"""Can the aggregator tell right candidates from wrong ones? Counted from the aggregations of an evaluation.

Every aggregation quotes candidates whose verdicts are known. Shares are ratios of counts over all problems; their
intervals resample the problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spiral_fast.evaluate.bootstrap import bootstrap_ratio
from spiral_fast.evaluate.stage import Sample

FEW = 10  # problems below which a share is marked as resting on few
PARTS = ("step_1", "all_steps")


def candidate_counts(population: Sequence[Sample], aggregations: Sequence[Sample], set_size: int) -> np.ndarray:
    """Counts of one problem's aggregations of one step, (set_size + 1, 6) float64: by number of right candidates, then

    0 aggregations, 1 right, 2 with a right candidate's answer, 3 with a wrong candidate's (and no right one's), 4 with
    an answer that no candidate gave, 5 without an answer. The last four partition the first. Answers are compared as
    the grader extracted them.
    """
    counts = np.zeros((set_size + 1, 6))
    for aggregation in aggregations:
        candidates = [population[i] for i in aggregation.members]
        right = {candidate.answer for candidate in candidates if candidate.correct} - {None}
        wrong = {candidate.answer for candidate in candidates} - right
        if aggregation.answer is None:
            kind = 5
        elif aggregation.answer in right:
            kind = 2
        else:
            kind = 3 if aggregation.answer in wrong else 4
        row = counts[sum(candidate.correct for candidate in candidates)]
        row[[0, kind]] += 1
        row[1] += aggregation.correct
    return counts


def verification(counts: np.ndarray, resamples: int, seed: int) -> dict[str, Any]:
    """The shares of one shape of RSA from (P, set_size + 1, 6) counts by problem (see `candidate_counts`)."""
    set_size = counts.shape[1] - 1
    right = np.arange(set_size + 1)

    def share(hits: np.ndarray, of: np.ndarray) -> dict[str, Any]:
        """(P,) each"""
        interval = bootstrap_ratio(hits, of, resamples, seed)
        return {"share": float(hits.sum() / of.sum()) if interval else None, "of": int(of.sum()), "interval": interval}

    def cell(rows: np.ndarray, shares: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
        problems = int((rows > 0).sum())
        named = {name: share(*pair) for name, pair in shares.items()}
        return {"aggregations": int(rows.sum()), "problems": problems, "few": problems < FEW, **named}

    by_right = [
        {"right": int(r), **cell(counts[:, r, 0], {"correct": (counts[:, r, 1], counts[:, r, 0])})} for r in right
    ]
    mixed, none = counts[:, 1:set_size].sum(axis=1), counts[:, 0]
    picked = mixed[:, 2] + mixed[:, 3]
    at_random = (counts[:, 1:set_size, 0] * right[1:set_size] / set_size).sum(axis=1)
    return {
        "by_right_candidates": by_right,
        "mixed": cell(
            mixed[:, 0],
            {
                "correct": (mixed[:, 1], mixed[:, 0]),
                "picks_right": (mixed[:, 2], mixed[:, 0]),
                "picks_wrong": (mixed[:, 3], mixed[:, 0]),
                "new_answer": (mixed[:, 4], mixed[:, 0]),
                "no_answer": (mixed[:, 5], mixed[:, 0]),
                "right_of_picked": (mixed[:, 2], picked),
                "chance": (at_random, mixed[:, 0]),
            },
        ),
        "all_wrong": cell(
            none[:, 0],
            {
                "correct": (none[:, 1], none[:, 0]),
                "new_answer": (none[:, 4], none[:, 0]),
                "repeats": (none[:, 3], none[:, 0]),
                "no_answer": (none[:, 5], none[:, 0]),
            },
        ),
    }
