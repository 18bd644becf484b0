"""Set credits on CPU: the loops of `reference.py` compiled by numba, one problem after the other."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from spiral_kernels.set_advantages.reference import MAX_EXACT, TOLERANCE, refuse_members


def set_advantages_numba(
    rewards: Tensor,
    reward_offsets: Tensor,
    members: Tensor,
    member_offsets: Tensor,
    trace_offsets: Tensor,
    set_offsets: Tensor,
    search_length: Tensor | None,
    aggregation_length: Tensor | None,
    search_target: int | None,
    aggregation_target: int | None,
    n_traces: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `set_advantages_reference`, for CPU tensors."""
    _, *of_members = offsets = [
        t.numpy() for t in (reward_offsets, members, member_offsets, trace_offsets, set_offsets)
    ]
    refuse_members(_member_fault(*of_members, n_traces))
    search, aggregation, set_credit, appearances = _credits(rewards.double().numpy(), *offsets)
    for credit, length, target in (
        (search, search_length, search_target),
        (aggregation, aggregation_length, aggregation_target),
    ):
        if target is not None:
            credit[(credit > 0) & (length.numpy() > target)] = 0.0
    return tuple(torch.from_numpy(array) for array in (search, aggregation, set_credit, appearances))


@njit(cache=True)
def _member_fault(members, member_offsets, trace_offsets, set_offsets, n_traces):
    last_set = np.full(n_traces, -1)  # that holds each trace
    for p in range(len(set_offsets) - 1):
        for s in range(set_offsets[p], set_offsets[p + 1]):
            for e in range(member_offsets[s], member_offsets[s + 1]):
                member = members[e]
                if not trace_offsets[p] <= member < trace_offsets[p + 1]:
                    return 2
                if last_set[member] == s:
                    return 1
                last_set[member] = s
    return 0


@njit(cache=True)
def _credits(rewards, reward_offsets, members, member_offsets, trace_offsets, set_offsets):
    n_traces = trace_offsets[-1]
    search, aggregation = np.zeros(n_traces), np.zeros(len(rewards))
    set_credit, appearances = np.zeros(len(reward_offsets) - 1), np.zeros(n_traces, np.int64)
    for p in range(len(set_offsets) - 1):
        first, last = set_offsets[p], set_offsets[p + 1]
        n_sets = last - first
        common, largest, exact = 1.0, 0.0, True
        for s in range(first, last):
            common = _lcm(common, float(reward_offsets[s + 1] - reward_offsets[s]))
            for r in range(reward_offsets[s], reward_offsets[s + 1]):
                largest = max(largest, abs(rewards[r]))
                exact = exact and rewards[r] == np.round(rewards[r])
        exact = exact and 4.0 * n_sets * n_sets * common * largest < MAX_EXACT
        if not exact:
            common = 1.0
        tolerance = 0.0 if exact else TOLERANCE * largest

        sum_of_scores = 0.0
        for s in range(first, last):
            n_aggregations = reward_offsets[s + 1] - reward_offsets[s]
            total = 0.0
            for r in range(reward_offsets[s], reward_offsets[s + 1]):
                total += rewards[r]
            for r in range(reward_offsets[s], reward_offsets[s + 1]):
                aggregation[r] = _decide((n_aggregations * rewards[r] - total) / n_aggregations, tolerance)
            set_credit[s] = total * (common / n_aggregations)
            sum_of_scores += set_credit[s]
        for s in range(first, last):
            numerator = n_sets * set_credit[s] - sum_of_scores
            for e in range(member_offsets[s], member_offsets[s + 1]):
                search[members[e]] += numerator
                appearances[members[e]] += 1
            set_credit[s] = _decide(numerator / (n_sets * common), tolerance)
        for t in range(trace_offsets[p], trace_offsets[p + 1]):
            if appearances[t]:
                search[t] = _decide(search[t] / (appearances[t] * (n_sets * common)), tolerance)
    return search, aggregation, set_credit, appearances


@njit(cache=True)
def _decide(credit, tolerance):
    return 0.0 if abs(credit) <= tolerance else credit


@njit(cache=True)
def _lcm(a, b):
    """Of two whole floats; the product of large ones is inexact, but only multiples below MAX_EXACT are used."""
    x, y = a, b
    while y:
        x, y = y, x % y
    return a / x * b
