"""Set credits on CUDA: one program per problem does all of `reference.py`, the gate and the check of the members."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spiral_kernels.set_advantages import reference

TRACES, MEMBERS, REWARDS = 32, 16, 32  # of a problem or a set, handled at once; more take more turns
MAX_EXACT = tl.constexpr(reference.MAX_EXACT)
TOLERANCE = tl.constexpr(reference.TOLERANCE)


def set_advantages_triton(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `set_advantages_reference`; credits are float32 where the rewards are, else float64."""
    *credits, faults = launch(*arguments)
    if len(faults):
        reference.refuse_members(int(faults.max()))
    return tuple(credits)


def launch(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Search, aggregation, set, appearances, and faults (P,) int32 as reference.member_fault."""
    dtype = torch.float32 if rewards.dtype == torch.float32 else torch.float64
    n_problems = len(set_offsets) - 1
    search = rewards.new_empty(n_traces, dtype=dtype)
    aggregation = rewards.new_empty(len(rewards), dtype=dtype)
    set_credit = rewards.new_empty(len(reward_offsets) - 1, dtype=dtype)
    appearances = rewards.new_empty(n_traces, dtype=torch.int64)
    faults = rewards.new_empty(n_problems, dtype=torch.int32)
    if n_problems:
        with torch.cuda.device_of(rewards):
            problem_kernel[(n_problems,)](
                rewards.contiguous(),
                reward_offsets.contiguous(),
                members.contiguous(),
                member_offsets.contiguous(),
                trace_offsets.contiguous(),
                set_offsets.contiguous(),
                None if search_target is None else search_length.contiguous(),
                None if aggregation_target is None else aggregation_length.contiguous(),
                search_target,
                aggregation_target,
                search,
                aggregation,
                set_credit,
                appearances,
                faults,
                TRACES=TRACES,
                MEMBERS=MEMBERS,
                REWARDS=REWARDS,
                num_warps=1,
            )
    return search, aggregation, set_credit, appearances, faults


@triton.jit(do_not_specialize=["search_target", "aggregation_target"])
def problem_kernel(
    rewards_ptr,  # (R,)
    reward_offsets_ptr,  # (S + 1,) int64, as all offsets
    members_ptr,  # (E,) int64
    member_offsets_ptr,  # (S + 1,)
    trace_offsets_ptr,  # (P + 1,)
    set_offsets_ptr,  # (P + 1,)
    search_length_ptr,  # (T,) int64, None: no gate
    aggregation_length_ptr,  # (R,) int64, None: no gate
    search_target,
    aggregation_target,
    search_ptr,  # (T,)
    aggregation_ptr,  # (R,)
    set_ptr,  # (S,)
    appearances_ptr,  # (T,) int64
    faults_ptr,  # (P,) int32
    TRACES: tl.constexpr,
    MEMBERS: tl.constexpr,
    REWARDS: tl.constexpr,
):
    problem = tl.program_id(0)
    first_set = tl.load(set_offsets_ptr + problem)
    last_set = tl.load(set_offsets_ptr + problem + 1)
    first_trace = tl.load(trace_offsets_ptr + problem)
    last_trace = tl.load(trace_offsets_ptr + problem + 1)
    n_sets = (last_set - first_set).to(tl.float64)

    # L, the common multiple of the sets' numbers of rewards; whether everything is a whole number float64 can hold
    multiple = tl.full((), 1, tl.int64)
    largest = tl.zeros((), tl.float64)
    n_not_whole = tl.zeros((), tl.int32)
    for s in range(first_set, last_set):
        first = tl.load(reward_offsets_ptr + s)
        last = tl.load(reward_offsets_ptr + s + 1)
        factor = (last - first) // greatest_divisor(multiple, last - first)
        too_large = multiple > 9007199254740992 // factor  # MAX_EXACT
        n_not_whole += too_large.to(tl.int32)
        multiple = tl.where(too_large, multiple, multiple * factor)
        for r in range(first, last, REWARDS):
            reward, inside = load_rewards(rewards_ptr, r, last, REWARDS)
            largest = tl.maximum(largest, tl.max(tl.abs(reward), 0))
            n_not_whole += tl.sum((reward != tl.floor(reward)).to(tl.int32), 0)
    exact = (n_not_whole == 0) & (4.0 * n_sets * n_sets * multiple.to(tl.float64) * largest < MAX_EXACT)
    common = tl.where(exact, multiple.to(tl.float64), 1.0)
    tolerance = tl.where(exact, 0.0, TOLERANCE * largest)

    sum_of_scores = tl.zeros((), tl.float64)  # L K b
    for s in range(first_set, last_set):
        first = tl.load(reward_offsets_ptr + s)
        last = tl.load(reward_offsets_ptr + s + 1)
        n = (last - first).to(tl.float64)
        total = sum_of_rewards(rewards_ptr, first, last, REWARDS)
        sum_of_scores += total * (common / n)
        for r in range(first, last, REWARDS):
            reward, inside = load_rewards(rewards_ptr, r, last, REWARDS)
            credit = decide((n * reward - total) / n, tolerance)
            at = r + tl.arange(0, REWARDS)
            if aggregation_length_ptr is not None:
                length = tl.load(aggregation_length_ptr + at, mask=inside, other=0)
                credit = tl.where((credit > 0) & (length > aggregation_target), 0.0, credit)
            tl.store(aggregation_ptr + at, credit.to(aggregation_ptr.dtype.element_ty), mask=inside)

    for s in range(first_set, last_set):
        numerator = set_numerator(rewards_ptr, reward_offsets_ptr, s, n_sets, common, sum_of_scores, REWARDS)
        credit = decide(numerator / (n_sets * common), tolerance)
        tl.store(set_ptr + s, credit.to(set_ptr.dtype.element_ty))

    n_found = tl.zeros((), tl.int64)
    n_twice = tl.zeros((), tl.int64)
    for t in range(first_trace, last_trace, TRACES):
        trace = t + tl.arange(0, TRACES)
        gathered = tl.zeros((TRACES,), tl.float64)
        appearances = tl.zeros((TRACES,), tl.int64)
        for s in range(first_set, last_set):
            first = tl.load(member_offsets_ptr + s)
            last = tl.load(member_offsets_ptr + s + 1)
            times = tl.zeros((TRACES,), tl.int64)  # the set holds each trace
            for e in range(first, last, MEMBERS):
                at = e + tl.arange(0, MEMBERS)
                member = tl.load(members_ptr + at, mask=at < last, other=-1)
                equal = (member[None, :] == trace[:, None]) & (trace < last_trace)[:, None]
                times += tl.sum(equal.to(tl.int64), 1)
            numerator = set_numerator(rewards_ptr, reward_offsets_ptr, s, n_sets, common, sum_of_scores, REWARDS)
            gathered += tl.where(times > 0, numerator, 0.0)
            appearances += times
            n_twice += tl.sum((times > 1).to(tl.int64), 0)
        n_found += tl.sum(appearances, 0)
        divisor = tl.maximum(appearances, 1).to(tl.float64) * (tl.maximum(n_sets, 1.0) * common)
        credit = decide(gathered / divisor, tolerance)
        inside = trace < last_trace
        if search_length_ptr is not None:
            length = tl.load(search_length_ptr + trace, mask=inside, other=0)
            credit = tl.where((credit > 0) & (length > search_target), 0.0, credit)
        tl.store(search_ptr + trace, credit.to(search_ptr.dtype.element_ty), mask=inside)
        tl.store(appearances_ptr + trace, appearances, mask=inside)

    n_members = tl.load(member_offsets_ptr + last_set) - tl.load(member_offsets_ptr + first_set)
    fault = tl.where(n_found != n_members, 2, tl.where(n_twice > 0, 1, 0))  # as reference.member_fault
    tl.store(faults_ptr + problem, fault)


@triton.jit
def load_rewards(rewards_ptr, first, last, REWARDS: tl.constexpr):
    at = first + tl.arange(0, REWARDS)
    reward = tl.load(rewards_ptr + at, mask=at < last, other=0)
    if reward.dtype == tl.bfloat16:
        reward = reward.to(tl.float32)
    return reward.to(tl.float64), at < last


@triton.jit
def sum_of_rewards(rewards_ptr, first, last, REWARDS: tl.constexpr):
    total = tl.zeros((), tl.float64)
    for r in range(first, last, REWARDS):
        reward, inside = load_rewards(rewards_ptr, r, last, REWARDS)
        total += tl.sum(reward, 0)
    return total


@triton.jit
def set_numerator(rewards_ptr, reward_offsets_ptr, s, n_sets, common, sum_of_scores, REWARDS: tl.constexpr):
    """L K A#(G)."""
    first = tl.load(reward_offsets_ptr + s)
    last = tl.load(reward_offsets_ptr + s + 1)
    score = sum_of_rewards(rewards_ptr, first, last, REWARDS) * (common / (last - first).to(tl.float64))
    return n_sets * score - sum_of_scores


@triton.jit
def decide(credit, tolerance):
    return tl.where(tl.abs(credit) <= tolerance, 0.0, credit)


@triton.jit
def greatest_divisor(a, b):
    while b != 0:
        rest = a % b
        a = b
        b = rest
    return a
