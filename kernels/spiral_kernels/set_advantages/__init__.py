"""Set credits of SPIRAL (arXiv 2606.23595, Algorithm 1 lines 8-15, equations 8-10), with exact zeros.

    f(G) = mean_j r(y_j^G)      A#(G) = f(G) - mean over the problem's sets of f
    search       A(y_i)   = mean of A#(G) over the sets G that contain i; 0 if none does
    aggregation  A(y_j^G) = r(y_j^G) - f(G)
    gate, last:  A > 0 and length > target -> 0

A credit that is zero in exact arithmetic is the number 0.0 on every backend. Integer rewards (0/1) are summed as
integers; other rewards give zero where |A| <= 1e-9 max|r| of the problem. All arithmetic is float64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.checks import Checks, described
from spiral_kernels.dispatch import choose_backend, register_backends, triton_unavailable
from spiral_kernels.set_advantages.reference import set_advantages_reference

__all__ = ["SetAdvantages", "flat_set_advantages", "set_advantages"]


class SetAdvantages(NamedTuple):
    search: Tensor  # credit of each search trace, after the gate
    aggregation: Tensor  # credit of each aggregation trace, after the gate
    set: Tensor  # A#(G) of each set
    appearances: Tensor  # int64, in how many sets each search trace is


def set_advantages(
    rewards: Tensor,
    sets: Tensor,
    n_search: int,
    *,
    search_length: Tensor | None = None,
    aggregation_length: Tensor | None = None,
    search_target: int | None = None,
    aggregation_target: int | None = None,
) -> SetAdvantages:
    """Credits of P problems of equal shape.

    rewards (P, K, N2) any real dtype; sets (P, K, n) int64 indices below `n_search` (N1), distinct within a set;
    lengths (P, N1) and (P, K, N2) int64 in tokens, needed where the target (L_target, tokens; None = no gate) is given.
    Returns search (P, N1), aggregation (P, K, N2), set (P, K) in the rewards' dtype (float32 for integer rewards) and
    appearances (P, N1). Raises ValueError for a shape or dtype that does not fit, an index out of range, a repeated
    member or rewards that are not finite.
    """
    checks = Checks("set_advantages")
    checks.tensors(rewards=rewards, sets=sets)
    checks.need(rewards.dim() == 3, f"rewards must be (P, K, N2), got {described(rewards)}")
    n_problems, n_sets, n_aggregations = rewards.shape
    of_rewards = sets.dim() == 3 and sets.shape[:2] == rewards.shape[:2] and sets.dtype == torch.int64
    checks.need(of_rewards, f"sets must be ({n_problems}, {n_sets}, n) int64, as rewards are, got {described(sets)}")
    checks.need(sets.device == rewards.device, f"sets is on {sets.device}, rewards on {rewards.device}")
    checks.whole("n_search", n_search, least=0)
    for name, length, shape in (
        ("search_length", search_length, (n_problems, n_search)),
        ("aggregation_length", aggregation_length, tuple(rewards.shape)),
    ):
        if length is not None:
            checks.beside(name, length, shape, rewards.device, torch.int64)

    def offsets(count: int, size: int) -> Tensor:
        return torch.arange(count + 1, device=rewards.device) * size

    members = sets + offsets(n_problems, n_search)[:-1, None, None]
    flat = flat_set_advantages(
        rewards.flatten(),
        offsets(n_problems * n_sets, n_aggregations),
        members.flatten(),
        offsets(n_problems * n_sets, sets.shape[2]),
        offsets(n_problems, n_search),
        offsets(n_problems, n_sets),
        search_length=None if search_length is None else search_length.flatten(),
        aggregation_length=None if aggregation_length is None else aggregation_length.flatten(),
        search_target=search_target,
        aggregation_target=aggregation_target,
    )
    return SetAdvantages(
        flat.search.view(n_problems, n_search),
        flat.aggregation.view(rewards.shape),
        flat.set.view(n_problems, n_sets),
        flat.appearances.view(n_problems, n_search),
    )


def flat_set_advantages(
    rewards: Tensor,
    reward_offsets: Tensor,
    members: Tensor,
    member_offsets: Tensor,
    trace_offsets: Tensor,
    set_offsets: Tensor,
    *,
    search_length: Tensor | None = None,
    aggregation_length: Tensor | None = None,
    search_target: int | None = None,
    aggregation_target: int | None = None,
) -> SetAdvantages:
    """Any number of search traces, sets, members and aggregations per problem; P problems, T traces, S sets, R rewards.

    Set s has the rewards reward_offsets[s] : reward_offsets[s + 1] of `rewards` (R,), at least one, and the members
    member_offsets[s] : member_offsets[s + 1] of `members`, indices into all T traces. Problem p has the traces
    trace_offsets[p] : trace_offsets[p + 1] and the sets set_offsets[p] : set_offsets[p + 1]. Offsets and members int64,
    lengths (T,) and (R,) int64. Returns search (T,), aggregation (R,), set (S,), appearances (T,); dtypes and errors as
    `set_advantages`.
    """
    checks = Checks("set_advantages")
    n_traces = _check(checks, rewards, reward_offsets, members, member_offsets, trace_offsets, set_offsets)
    for name, length, target, like in (
        ("search", search_length, search_target, n_traces),
        ("aggregation", aggregation_length, aggregation_target, len(rewards)),
    ):
        if target is not None:
            checks.whole(f"{name}_target", target, least=0)
            checks.need(length is not None, f"{name}_target is {target}: pass {name}_length")
        if length is not None:
            checks.beside(f"{name}_length", length, (like,), rewards.device, torch.int64)
    credits = torch.ops.spiral_kernels.set_advantages(
        rewards,
        reward_offsets,
        members,
        member_offsets,
        trace_offsets,
        set_offsets,
        search_length,
        aggregation_length,
        search_target,
        aggregation_target,
        n_traces,
    )
    return SetAdvantages(*credits)


def _check(checks: Checks, rewards, reward_offsets, members, member_offsets, trace_offsets, set_offsets) -> int:
    """The number of traces. Waits for the device once; what lies inside the sets is checked by the backends."""
    checks.tensors(rewards=rewards)
    checks.beside("rewards", rewards, (rewards.numel(),), rewards.device)
    named = {
        "reward_offsets": reward_offsets,
        "member_offsets": member_offsets,
        "trace_offsets": trace_offsets,
        "set_offsets": set_offsets,
    }
    for name, values in (named | {"members": members}).items():
        checks.tensors(**{name: values})
        checks.beside(name, values, (values.numel(),), rewards.device, torch.int64)
        checks.need(len(values) > 0 or name == "members", f"{name} must start at 0, it is empty")
    finite = torch.isfinite(rewards).all().long()
    firsts, steps, ends = (
        [of(offsets) for offsets in named.values()]
        for of in (lambda o: o[0], lambda o: torch.cat([o.diff(), o.new_ones(1)]).amin(), lambda o: o[-1])
    )
    finite, *numbers = torch.stack([finite, *firsts, *steps, *ends]).tolist()
    checks.need(bool(finite), "rewards: not finite")
    for name, first, step in zip(named, numbers[:4], numbers[4:8], strict=True):
        checks.need(first == 0 and step >= 0, f"{name} must start at 0 and never fall")
    n_sets = len(reward_offsets) - 1
    found = (numbers[8], numbers[9], numbers[11], len(member_offsets) - 1)
    expected = (len(rewards), len(members), n_sets, n_sets)
    checks.need(found == expected, f"offsets of rewards, members, sets end at {found[:3]}: expected {expected[:3]}")
    checks.need(numbers[4] >= 1, "reward_offsets: every set needs at least one aggregation")
    return numbers[10]


@torch.library.custom_op(
    "spiral_kernels::set_advantages",
    mutates_args=(),
    schema="(Tensor rewards, Tensor reward_offsets, Tensor members, Tensor member_offsets, Tensor trace_offsets, "
    "Tensor set_offsets, Tensor? search_length, Tensor? aggregation_length, SymInt? search_target, "
    "SymInt? aggregation_target, SymInt n_traces) "
    "-> (Tensor search, Tensor aggregation, Tensor set, Tensor appearances)",
)
def _set_advantages(rewards, *offsets_lengths_targets_and_count):
    backend = choose_backend("set_advantages", rewards.device, rewards.dtype)
    if backend == "triton":
        from spiral_kernels.set_advantages.triton import set_advantages_triton as run
    elif backend == "numba":
        from spiral_kernels.set_advantages.numba import set_advantages_numba as run
    else:
        run = set_advantages_reference
    *credits, appearances = run(rewards, *offsets_lengths_targets_and_count)
    return *(credit.to(_credit_dtype(rewards)) for credit in credits), appearances


@_set_advantages.register_fake
def _(rewards, reward_offsets, *others):
    dtype, n_traces = _credit_dtype(rewards), others[-1]
    return (
        rewards.new_empty(n_traces, dtype=dtype),
        rewards.new_empty(len(rewards), dtype=dtype),
        rewards.new_empty(len(reward_offsets) - 1, dtype=dtype),
        rewards.new_empty(n_traces, dtype=torch.int64),
    )


def _credit_dtype(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.dtype.is_floating_point else torch.float32


def _no_numba(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return "runs on CPU tensors only"
    return _numba_unavailable()


@functools.cache
def _numba_unavailable() -> str | None:
    try:
        import spiral_kernels.set_advantages.numba  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: nowhere to keep the compiled code
        return f"numba cannot be used: {error}"
    return None


register_backends(
    "set_advantages",
    {
        "triton": lambda device, dtype: triton_unavailable(device),
        "numba": _no_numba,
        "torch": lambda device, dtype: None,
    },
)
