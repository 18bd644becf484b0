"""Which search traces are aggregated together: the set samplers and what the search gradient's expectation becomes.

With i.i.d. search traces y_1..y_N1 and the credits of `spiral_kernels.set_advantages`, each sampler gives exactly
E[sum_i A(y_i) grad log pi(y_i)] = M grad J for every aggregator, order-sensitive ones included; `multiplicity` is M.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import comb, perm

import numpy as np


def sample_sets(
    sampler: str,
    n_search: int,
    set_size: int,
    n_sets: int,
    rng: np.random.Generator,
    *,
    member_order: str = "index",
) -> np.ndarray:
    """K = `n_sets` distinct sets of n = `set_size` of the N1 = `n_search` traces: (K, n) int64 trace indices.

    uniform   K of the C(N1, n) unordered sets, members in ascending index (the paper's implementation)
    ordered   K of the N1! / (N1 - n)! ordered tuples (Proposition 3.1)
    balanced  every trace in exactly K n / N1 sets, see `_balance`

    `member_order`: "index" = ascending (for `ordered`: as drawn); "shared_first" = see `shared_first`, `balanced` only.
    """
    if member_order == "shared_first" and sampler != "balanced":
        raise ValueError(
            f"member_order 'shared_first' with the sampler {sampler!r} biases the gradient of an order-sensitive "
            "aggregator; use the sampler 'balanced'"
        )
    possible = (perm if sampler == "ordered" else comb)(n_search, set_size)
    if not 1 <= n_sets <= possible:
        raise ValueError(f"n_sets is {n_sets}: {possible} distinct sets of {set_size} out of {n_search} traces exist")
    if possible >= 2**63:
        raise ValueError(f"set_size is {set_size}: more than 2^63 sets of {n_search} traces; use a smaller set_size")
    ranks = _distinct(possible, n_sets, rng)
    if sampler == "ordered":
        return np.array([_arrangement(rank, n_search, set_size) for rank in ranks], np.int64)
    sets = [_combination(rank, n_search, set_size) for rank in ranks]
    if sampler == "uniform":
        return np.array(sets, np.int64)
    if sampler != "balanced":
        raise ValueError(f"set sampler {sampler!r}: allowed are 'uniform', 'ordered', 'balanced'")
    sets = np.array([sorted(members) for members in _balance([frozenset(s) for s in sets], n_search, rng)], np.int64)
    return shared_first(sets) if member_order == "shared_first" else sets


def multiplicity(sampler: str, n_search: int, set_size: int, n_sets: int) -> float:
    """M in E[search term] = M grad_search J: (N1 / n) q - 1, q = probability that a trace is in some set (Prop. 3.1).

    0.8858 (uniform), 0.8754 (ordered), 1 (balanced) at N1 = 8, n = 4, K = 4.
    """
    if sampler == "balanced":
        q = Fraction(1)
    else:
        count = perm if sampler == "ordered" else comb
        q = 1 - Fraction(comb(count(n_search - 1, set_size), n_sets), comb(count(n_search, set_size), n_sets))
    return float(Fraction(n_search, set_size) * q - 1)


def shared_first(sets: np.ndarray) -> np.ndarray:
    """Reorder the members of each set so that the sets of a problem share long prefixes: (K, n) -> (K, n).

    Greedy prefix tree: the trace that most of the sets contain comes first in those, then the same among them for the
    next position; ties go to the lower index. The order depends on membership alone, never on what a trace says.
    """
    order: dict[int, list[int]] = {k: [] for k in range(len(sets))}

    def arrange(group: dict[int, frozenset[int]]) -> None:
        while any(group.values()):
            count = Counter(trace for members in group.values() for trace in members)
            first = min(count, key=lambda trace: (-count[trace], trace))
            inside = {k: members - {first} for k, members in group.items() if first in members}
            for k in inside:
                order[k].append(first)
            arrange(inside)
            group = {k: members for k, members in group.items() if k not in inside}

    arrange({k: frozenset(members) for k, members in enumerate(sets.tolist())})
    return np.array([order[k] for k in range(len(sets))], np.int64).reshape(sets.shape)


def _balance(sets: list[frozenset[int]], n_search: int, rng: np.random.Generator) -> list[frozenset[int]]:
    """Exchange members of uniformly drawn sets until every trace is in exactly K n / N1 of them.

    One exchange takes a random trace a that is in too many sets and a random trace b that is in too few, and puts b in
    a's place in a random set where that repeats no set. Such a set exists: a is in more sets than b, and a -> b maps
    the sets with a and without b one to one, so not all images can be there already. Each exchange lowers the total
    imbalance, hence it ends; sets stay distinct. No step looks at an index as a number, so the distribution is
    symmetric under relabelling of the traces.
    """
    places = sum(map(len, sets))
    each, rest = divmod(places, n_search)
    if rest:
        raise ValueError(f"sampler 'balanced': n_search ({n_search}) must divide n_sets * set_size ({places})")
    while True:
        count = Counter(trace for members in sets for trace in members)
        over = [trace for trace in range(n_search) if count[trace] > each]
        under = [trace for trace in range(n_search) if count[trace] < each]
        if not over:
            return sets
        a, b = over[rng.integers(len(over))], under[rng.integers(len(under))]
        with_a = [k for k, members in enumerate(sets) if a in members and b not in members]
        allowed = [k for k in with_a if (sets[k] - {a} | {b}) not in sets]
        k = allowed[rng.integers(len(allowed))]
        sets[k] = sets[k] - {a} | {b}


def _distinct(total: int, k: int, rng: np.random.Generator) -> list[int]:
    """k distinct numbers below `total`, every subset equally likely (Floyd's algorithm)."""
    chosen: dict[int, None] = {}  # in the order of drawing
    for top in range(total - k, total):
        pick = int(rng.integers(top + 1))
        chosen[top if pick in chosen else pick] = None
    return list(chosen)


def _combination(rank: int, n_search: int, set_size: int) -> list[int]:
    """The rank-th of the C(N1, n) ascending tuples in lexicographic order."""
    members: list[int] = []
    for trace in range(n_search):
        if len(members) == set_size:
            break
        containing = comb(n_search - trace - 1, set_size - len(members) - 1)  # of the tuples left, those with `trace`
        if rank < containing:
            members.append(trace)
        else:
            rank -= containing
    return members


def _arrangement(rank: int, n_search: int, set_size: int) -> list[int]:
    """The rank-th of the N1! / (N1 - n)! ordered tuples: one digit of radix N1, N1 - 1, ... per position."""
    left, members = list(range(n_search)), []
    for _ in range(set_size):
        rank, digit = divmod(rank, len(left))
        members.append(left.pop(digit))
    return members
