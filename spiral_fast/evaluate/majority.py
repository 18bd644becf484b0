"""majority@k: sample k traces, choose the answer most of them give, grade it (self-consistency, arXiv 2203.11171)."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Exact mean of majority voting over all subsets of k of the traces.

    `answers` and `correct` hold one entry per trace. Ties: each answer with the most votes is chosen equally often.
    A trace without an answer (None: no box or an empty one) does not vote; where nobody votes the result is wrong.
    Traces of one answer share a verdict; where they do not (one could not be graded), the answer counts as correct by
    its share of correct traces.

    Method: for each number of votes v of the winner, one pass over the answers counts the subsets by (size, answers
    tied at v), and the same weighted by how many of the tied are correct. All numbers are counts of subsets, below 2^63
    and in float64.
    """
    if k > len(answers):
        raise ValueError(f"majority@{k} needs at least {k} samples, there are {len(answers)}")
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    silent = len(answers) - sum(map(len, votes.values()))

    wins = 0.0
    for v in range(1, k + 1):
        ways = np.zeros((k + 1, k // v + 2))  # subsets by size and number of answers with exactly v votes
        right_ways = np.zeros_like(ways)  # the same, times the sum of the tied answers' correctness
        ways[0, 0] = 1
        for rights in votes.values():
            new, new_right = np.zeros_like(ways), np.zeros_like(ways)
            for j in range(min(v, len(rights)) + 1):  # votes of this answer
                n, tied = comb(len(rights), j), int(j == v)
                size, ties = slice(j, None), slice(tied, None)
                old = ways[: k + 1 - j, : ways.shape[1] - tied]
                old_right = right_ways[: k + 1 - j, : ways.shape[1] - tied]
                new[size, ties] += n * old
                new_right[size, ties] += n * (old_right + tied * sum(rights) / len(rights) * old)
            ways, right_ways = new, new_right
        for ties in range(1, k // v + 1):
            for size in range(v * ties, k + 1):
                wins += right_ways[size, ties] / ties * comb(silent, k - size)
    return wins / comb(len(answers), k)
