"""Set credits in plain torch float64, on any device: the truth the other backends are tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_EXACT = 2.0**53  # float64 holds every integer up to it
TOLERANCE = 1e-9  # of max|r| of the problem: below it a credit of rewards that are not integers is zero


def set_advantages_reference(
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
    """Flat form, see `flat_set_advantages`: search (T,), aggregation (R,), set (S,) float64 and appearances (T,) int64.

    Scores are carried as numerators over L, the least common multiple of the problem's numbers of aggregations per set:
    with integer rewards every number below is an integer until the one division at the end, so zeros are exact.
    Raises ValueError where a set's members are not distinct traces of its problem.
    """
    refuse_members(member_fault(members, member_offsets, trace_offsets, set_offsets, n_traces))
    rewards = rewards.double()
    n_aggregations = reward_offsets.diff()  # (S,)
    n_sets = set_offsets.diff().clamp(min=1)  # (P,); a problem without sets has no credit to divide
    set_of_reward = _owners(n_aggregations)  # (R,)
    set_of_member = _owners(member_offsets.diff())  # (E,)
    problem_of_set = _owners(set_offsets.diff())  # (S,)
    problem_of_trace = _owners(trace_offsets.diff())  # (T,)
    problem_of_reward = problem_of_set[set_of_reward]  # (R,)

    def zeros(n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.float64, device=rewards.device)

    largest = zeros(len(n_sets)).scatter_reduce(0, problem_of_reward, rewards.abs(), "amax")  # (P,)
    fractional = zeros(len(n_sets)).index_add(0, problem_of_reward, (rewards != rewards.round()).double()) > 0
    common = torch.tensor(_common_multiples(n_aggregations, set_offsets), dtype=torch.float64, device=rewards.device)
    exact = ~fractional & (4 * n_sets * n_sets * common * largest < MAX_EXACT)
    common = torch.where(exact, common, 1.0)
    tolerance = torch.where(exact, 0.0, TOLERANCE * largest)

    total = zeros(len(n_aggregations)).index_add(0, set_of_reward, rewards)  # (S,)
    score = total * (common[problem_of_set] / n_aggregations)  # L f(G)
    sum_of_scores = zeros(len(n_sets)).index_add(0, problem_of_set, score)  # L K b
    numerator = n_sets[problem_of_set] * score - sum_of_scores[problem_of_set]  # L K A#(G)
    appearances = torch.zeros_like(problem_of_trace).index_add(0, members, torch.ones_like(members))  # |G(y_i)|
    gathered = zeros(len(problem_of_trace)).index_add(0, members, numerator[set_of_member])

    def decide(credit: Tensor, problem: Tensor, length: Tensor | None, target: int | None) -> Tensor:
        credit = torch.where(credit.abs() <= tolerance[problem], 0.0, credit)
        return credit if target is None else torch.where((credit > 0) & (length > target), 0.0, credit)

    search = gathered / (appearances.clamp(min=1) * (n_sets * common)[problem_of_trace])
    aggregation = (n_aggregations[set_of_reward] * rewards - total[set_of_reward]) / n_aggregations[set_of_reward]
    set_credit = numerator / (n_sets * common)[problem_of_set]
    return (
        decide(search, problem_of_trace, search_length, search_target),
        decide(aggregation, problem_of_reward, aggregation_length, aggregation_target),
        decide(set_credit, problem_of_set, None, None),
        appearances,
    )


def member_fault(
    members: Tensor, member_offsets: Tensor, trace_offsets: Tensor, set_offsets: Tensor, n_traces: int
) -> int:
    """0: each set's members are distinct traces of its problem; 1: one is there twice; 2: one is not of its problem."""
    set_of_member = _owners(member_offsets.diff())
    problem = _owners(set_offsets.diff())[set_of_member]
    if not ((trace_offsets[problem] <= members) & (members < trace_offsets[problem + 1])).all():
        return 2
    return int(len(torch.unique(set_of_member * n_traces + members)) != len(members))


def refuse_members(fault: int) -> None:
    """Raises ValueError for what `member_fault` found."""
    if fault:
        what = "the same trace twice" if fault == 1 else "a trace of another problem, or none at all"
        raise ValueError(f"members: a set contains {what}")


def _owners(sizes: Tensor) -> Tensor:
    """[2, 0, 3] -> [0, 0, 2, 2, 2]."""
    return torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)


def _common_multiples(n_aggregations: Tensor, set_offsets: Tensor) -> list[float]:
    sizes, offsets = n_aggregations.tolist(), set_offsets.tolist()
    multiples = [math.lcm(*sizes[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)]
    return [float(min(multiple, 2**60)) for multiple in multiples]  # above MAX_EXACT the value does not matter
