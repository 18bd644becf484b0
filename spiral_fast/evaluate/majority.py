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

    Method: were each trace in the sample by itself with probability k/N, the votes of the answers would be independent
    and binomial; given a total of k, each subset of k is equally likely. For each number of votes v of the winner, one
    pass over the answers gives the probability of each (size, answers tied at v), and the same times how many of the
    tied are correct. All numbers are such probabilities in float64: the sizes of samples and subsets are free.
    """
    n = len(answers)
    if k > n:
        raise ValueError(f"majority@{k} needs at least {k} samples, there are {n}")
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    chances = [(_binomial(len(rights), k, n), sum(rights) / len(rights)) for rights in votes.values()]
    silent = _binomial(n - sum(map(len, votes.values())), k, n)

    win = 0.0
    for v in range(1, min(k, max(map(len, votes.values()), default=0)) + 1):
        most_ties = min(k // v, len(votes))
        ways = np.zeros((k + 1, most_ties + 2))  # by size and number of answers with exactly v votes
        right_ways = np.zeros_like(ways)  # the same, times the sum of the tied answers' correctness
        ways[0, 0] = 1
        for chance, share in chances:
            new, new_right = np.zeros_like(ways), np.zeros_like(ways)
            for j in range(min(v, len(chance) - 1) + 1):  # votes of this answer
                tied = int(j == v)
                size, ties = slice(j, None), slice(tied, None)
                old = ways[: k + 1 - j, : ways.shape[1] - tied]
                old_right = right_ways[: k + 1 - j, : ways.shape[1] - tied]
                new[size, ties] += chance[j] * old
                new_right[size, ties] += chance[j] * (old_right + tied * share * old)
            ways, right_ways = new, new_right
        for ties in range(1, most_ties + 1):
            for size in range(max(v * ties, k + 1 - len(silent)), k + 1):
                win += right_ways[size, ties] / ties * silent[k - size]
    return min(1.0, float(win / _binomial(n, k, n)[k]))  # rounding may pass 1


def _binomial(size: int, k: int, n: int) -> list[float]:
    """Probabilities of 0, 1, ... `size` successes, each with probability k / n; quotients of integers, rounded once."""
    whole = n**size
    return [comb(size, j) * k**j * (n - k) ** (size - j) / whole for j in range(size + 1)]
