"""What the backends of tree_attention need to know of a tree, checked and formed on the host once, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.prefix_tree import PrefixTree

NODE_ARRAYS = ("start", "end", "parent", "subtree_end")


class TreePlan(NamedTuple):
    """T rows in M nodes, depth-first. Query row q sees key row k if and only if k <= q < visible_until[k]."""

    start: Tensor  # (M,) int64 on CPU, as in PrefixTree; so the next three
    end: Tensor
    parent: Tensor
    subtree_end: Tensor
    visible_until: Tensor  # (T,) int32 on the plan's device: subtree_end of the row's node
    tiles: tuple[Tensor, ...]  # on the plan's device: triton_tiles.plan_tiles(*nodes); () where Triton does not run

    @classmethod
    def of(cls, tree: PrefixTree | TreePlan | Sequence, device: str | torch.device = "cpu") -> TreePlan:
        """The plan of a PrefixTree, or of its (start, end, parent, subtree_end): (M,) integers each; for q on `device`.

        Raises ValueError with one line where the nodes are not a depth-first cover of the rows 0 .. T-1.
        """
        device = torch.device(device)
        if isinstance(tree, PrefixTree | TreePlan):
            tree = tree.start, tree.end, tree.parent, tree.subtree_end
        nodes = _nodes(tree)
        _check(*(array.tolist() for array in nodes))
        start, end, _, subtree_end = nodes
        visible_until = torch.repeat_interleave(subtree_end, end - start).to(device, torch.int32)
        return cls(*nodes, visible_until, tuple(tensor.to(device) for tensor in _tiles(nodes, device)))

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> TreePlan:
        """Inverse of `tensors`."""
        return cls(*tensors[:5], tuple(tensors[5:]))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in one flat list, as the operators take them."""
        return [*self[:5], *self.tiles]


def _tiles(nodes: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    from spiral_kernels.tree_attention import triton_why_not

    if triton_why_not(device, torch.float32) is not None:
        return ()
    from spiral_kernels.tree_attention.triton_tiles import plan_tiles

    return plan_tiles(*nodes)


def _nodes(arrays: Sequence) -> list[Tensor]:
    if len(arrays) != len(NODE_ARRAYS):
        raise ValueError(
            f"tree_attention: a tree is a PrefixTree, a TreePlan or {NODE_ARRAYS}, got {len(arrays)} items"
        )
    nodes = [torch.as_tensor(array) for array in arrays]
    for name, array in zip(NODE_ARRAYS, nodes, strict=True):
        whole = not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)
        if array.dim() != 1 or not (whole or not len(array)) or len(array) != len(nodes[0]):
            found = f"{tuple(array.shape)} {str(array.dtype).removeprefix('torch.')}"
            raise ValueError(f"tree_attention: {name} must be (M,) integers, M = {len(nodes[0])}, got {found}")
    return [array.to("cpu", torch.int64) for array in nodes]


def _check(start: list[int], end: list[int], parent: list[int], subtree_end: list[int]) -> None:
    def need(good: bool, message: str) -> None:
        if not good:
            raise ValueError(f"tree_attention: {message}")

    open_nodes: list[int] = []  # the path from a root to the node before

    def close(node: int, row: int) -> None:
        message = f"subtree_end of node {node} is {subtree_end[node]}, but its subtree ends at row {row}"
        need(subtree_end[node] == row, message)

    rows = 0
    for node in range(len(start)):
        message = f"nodes must cover the rows in order: node {node} starts at row {start[node]}, not at {rows}"
        need(start[node] == rows, message)
        need(end[node] > rows, f"node {node} ends at row {end[node]} but starts at {rows}; nodes are never empty")
        while open_nodes and open_nodes[-1] != parent[node]:
            close(open_nodes.pop(), rows)
        message = f"node {node} has parent {parent[node]}: nodes must be depth-first, roots with parent -1"
        need(bool(open_nodes) or parent[node] == -1, message)
        open_nodes.append(node)
        rows = end[node]
    while open_nodes:
        close(open_nodes.pop(), rows)
    need(rows < 2**31, f"{rows} rows; row numbers are 32-bit")
