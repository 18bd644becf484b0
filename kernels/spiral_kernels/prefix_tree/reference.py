"""The prefix tree in plain Python and numpy, from its definition: groups of traces that agree, split where they differ.

The truth the C++ builder is tested against array by array, and what runs where the native module is missing.
"""

from __future__ import annotations

import numpy as np


def prefix_tree_reference(
    tokens: np.ndarray,
    offsets: np.ndarray,
    sampled: np.ndarray,
    live: np.ndarray | None,
    min_shared_run: int,
) -> tuple[np.ndarray, ...]:
    """Arguments as `PrefixTree.build`, checked. The fields of PrefixTree in their order, without trace_offsets."""
    trace = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))  # (N,)
    position = np.arange(len(tokens)) - offsets[trace]  # (N,)
    traces = [
        tokens[begin : begin + length]
        for begin, length in zip(offsets[:-1], _computed_lengths(offsets, trace, position, sampled, live), strict=True)
    ]

    trace_rows = np.full(len(tokens), -1)
    start, end, parent, pieces, depths = [], [], [], [], []
    rows = 0
    # Groups still to be placed, the next one last: traces that agree on their tokens before `depth`, the node whose
    # children they are, and the depth at which their own node would begin.
    groups = [(members, 0, 0, -1) for members in _branches(traces, range(len(traces)), 0)[::-1]]
    while groups:
        members, begin, depth, above = groups.pop()
        depth = _agreeing(traces, members, depth)
        longest = max(members, key=lambda i: len(traces[i]))
        leaf = depth == len(traces[longest])
        if not leaf and depth - begin < min_shared_run:  # too short a run: the branches repeat it
            branches = _branches(traces, members, depth)
            branches[0] += [i for i in members if len(traces[i]) <= depth]
        else:
            branches = [] if leaf else _branches(traces, members, depth)
            for i in members:
                here = trace_rows[offsets[i] + begin : offsets[i] + min(depth, len(traces[i]))]
                here[:] = rows + np.arange(len(here))
            start.append(rows)
            parent.append(above)
            pieces.append(traces[longest][begin:depth])
            depths.append(np.arange(begin, depth))
            rows += depth - begin
            end.append(rows)
            begin, above = depth, len(start) - 1
        groups += [(branch, begin, depth, above) for branch in branches[::-1]]

    subtree_end = list(end)
    for node in range(len(start) - 1, -1, -1):
        if parent[node] >= 0:
            subtree_end[parent[node]] = max(subtree_end[parent[node]], subtree_end[node])

    edges = np.flatnonzero(sampled)
    integers = [np.array(values, np.int64) for values in (start, end, parent, subtree_end)]
    return (
        np.concatenate([np.zeros(0, np.int64), *pieces]),
        np.concatenate([np.zeros(0, np.int64), *depths]),
        *integers,
        trace_rows[edges - 1],
        tokens[edges].astype(np.int64),
        trace[edges],
        position[edges],
        trace_rows,
    )


def _computed_lengths(offsets, trace, position, sampled, live) -> np.ndarray:
    """How many tokens of each trace are computed: all, or those that a live sampled token comes after."""
    if live is None:
        return np.diff(offsets)
    edges = np.flatnonzero(sampled)[live]
    lengths = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(lengths, trace[edges], position[edges])
    return lengths


def _branches(traces: list[np.ndarray], members, depth: int) -> list[list[int]]:
    """The members that go on at `depth`, grouped by their token there, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for i in members:
        if len(traces[i]) > depth:
            groups.setdefault(int(traces[i][depth]), []).append(i)
    return list(groups.values())


def _agreeing(traces: list[np.ndarray], members: list[int], depth: int) -> int:
    """The first depth at which two members differ; the longest member's length if none do. They agree before `depth`.

    A member that ends does not differ.
    """
    longest = max((traces[i] for i in members), key=len)
    end = len(longest)
    for i in members:
        stop = min(end, len(traces[i]))
        differ = longest[depth:stop] != traces[i][depth:stop]
        if differ.any():
            end = depth + int(differ.argmax())
    return end
