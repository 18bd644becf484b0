"""majority@k: sample k traces, choose the answer most of them give, grade it (self-consistency, arXiv 2203.11171)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    pass over the answers that can have v votes gives the probability of each (size, answers tied at v), and the same
    times how many of the tied are correct; all other traces together are one binomial. All numbers are such
    probabilities in float64: the sizes of samples and subsets are free.
    """
    n = len(answers)
    if k > n:
        raise ValueError(f"majority@{k} needs at least {k} samples, there are {n}")
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    counts = [(len(rights), sum(rights) / len(rights)) for rights in votes.values()]  # votes, share of correct traces

    win = 0.0
    for v in range(1, min(k, max(map(len, votes.values()), default=0)) + 1):
        contenders = [(size, share) for size, share in counts if size >= v]
        rest = _binomial(n - sum(size for size, _ in contenders), k, n)
        most_ties = min(k // v, len(contenders))
        ways = np.zeros((k + 1, most_ties + 2))  # by size and number of answers with exactly v votes
        right_ways = np.zeros_like(ways)  # the same, times the sum of the tied answers' correctness
        ways[0, 0] = 1
        for size, share in contenders:
            chance = _binomial(size, k, n)
            new, new_right = np.zeros_like(ways), np.zeros_like(ways)
            for j in range(v + 1):  # votes of this answer
                tied = int(j == v)
                sizes, ties = slice(j, None), slice(tied, None)
                old = ways[: k + 1 - j, : ways.shape[1] - tied]
                old_right = right_ways[: k + 1 - j, : ways.shape[1] - tied]
                new[sizes, ties] += chance[j] * old
                new_right[sizes, ties] += chance[j] * (old_right + tied * share * old)
            ways, right_ways = new, new_right
        fits = min(k + 1, len(rest))  # the rest fills the sample up to k
        missing = rest[:fits][::-1]
        for ties in range(1, most_ties + 1):
            win += missing @ right_ways[k + 1 - fits :, ties] / ties
    return min(1.0, float(win / _binomial(n, k, n)[k]))  # rounding may pass 1


@lru_cache(maxsize=1024)
def _binomial(size: int, k: int, n: int) -> np.ndarray:
    """Probabilities of 0, 1, ... min(size, k) successes of `size`, each with probability k / n: exact, rounded once."""
    whole = n**size
    return np.array([comb(size, j) * k**j * (n - k) ** (size - j) / whole for j in range(min(size, k) + 1)])
