"""Which rows have which runs of cached tokens before them. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spiral_fast.lists import Lists
from spiral_fast.rollout.radix.tree import Node


class SharedRuns(NamedTuple):
    slots: Lists  # of each run; every token of the rows' prompts is in exactly one run
    rows: Lists  # of each run: all rows that have it in their prompt
    places: Lists  # of each row: where it stands in rows.values, in the order of its prompt


def shared_runs(prompts: Sequence[Node]) -> SharedRuns:
    """The prompts of the rows (the node where each ends) as runs, a run as long as the rows that share it allow."""
    ending: dict[Node, list[int]] = {}
    children: dict[Node, list[Node]] = {}
    linked: dict[Node, None] = {}  # in the order found
    for row, node in enumerate(prompts):
        ending.setdefault(node, []).append(row)
        while node.parent is not None and node not in linked:
            linked[node] = None
            children.setdefault(node.parent, []).append(node)
            node = node.parent
    order, stack = [], [node for node in linked if node.parent.parent is None]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children.get(node, ()))
    below: dict[Node, list[int]] = {}
    for node in reversed(order):
        below[node] = [*ending.get(node, ()), *(row for child in children.get(node, ()) for row in below[child])]
    before: dict[Node, list[np.ndarray]] = {}  # slots of ancestors below which there are no other rows
    slots, rows = [], []
    for node in order:
        run = [*before.get(node, ()), node.slots]
        own = children.get(node, ())
        if len(own) == 1 and node not in ending:
            before[own[0]] = run
        else:
            slots.append(np.concatenate(run))
            rows.append(np.array(below[node]))
    of_runs = Lists.of(rows)
    counts = np.bincount(of_runs.values, minlength=len(prompts))
    places = Lists(np.argsort(of_runs.values, kind="stable"), np.cumsum([0, *counts], dtype=np.int64))
    return SharedRuns(Lists.of(slots), of_runs, places)
