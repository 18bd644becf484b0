"""Trees for tests, without tokens."""

from __future__ import annotations

import torch


def nodes_of(parents: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """(start, end, parent, subtree_end) of depth-first nodes, int64."""
    end = torch.tensor(lengths).cumsum(0)
    subtree_end = end.clone()
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            subtree_end[parents[node]] = max(subtree_end[parents[node]], subtree_end[node])
    return end - torch.tensor(lengths), end, torch.tensor(parents), subtree_end
