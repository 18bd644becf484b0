"""What the backends of tree_attention need to know of a tree, checked and formed on the host once, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spiral_kernels.dispatch import BackendError, choose_backend
from spiral_kernels.prefix_tree import PrefixTree
from spiral_kernels.tree_attention.levels import NO_LEVELS, Levels, levels_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CASCADES = {"cascade", "cascade_flash_attn"}  # backends that read `levels`
NODE_ARRAYS = ("start", "end", "parent", "subtree_end")


class TreePlan(NamedTuple):
    """T rows in M nodes, depth-first. Query row q sees key row k if and only if k <= q < visible_until[k].

    `tiles` and `levels` hold something only for the backends that would serve on the device when the plan was made.
    """

    start: Tensor  # (M,) int64 on CPU, as in PrefixTree; so the next three
    end: Tensor
    parent: Tensor
    subtree_end: Tensor
    visible_until: Tensor  # (T,) int32 on the plan's device: subtree_end of the row's node
    tiles: tuple[Tensor, ...]  # on the plan's device: triton_tiles.plan_tiles(*nodes); else ()
    levels: Levels  # for the cascades; else none

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
        backends = _backends(device)
        tiles: tuple[Tensor, ...] = ()
        if "triton" in backends:
            from spiral_kernels.tree_attention.triton_tiles import plan_tiles

            tiles = tuple(tensor.to(device) for tensor in plan_tiles(*nodes))
        levels = levels_of(*nodes, device) if backends & CASCADES else NO_LEVELS
        return cls(*nodes, visible_until, tiles, levels)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> TreePlan:
        """Inverse of `tensors`."""
        n_fixed = 6
        tiles_begin = n_fixed + 4 * len(tensors[5])
        levels = Levels(tensors[5], tuple(tensors[n_fixed:tiles_begin]))
        return cls(*tensors[:5], tuple(tensors[tiles_begin:]), levels)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in one flat list, as the operators take them."""
        return [*self[:5], self.levels.longest, *self.levels.tensors, *self.tiles]


def _backends(device: torch.device) -> set[str]:
    """Backends of tree_attention that would serve on the device now."""
    backends = set()
    for dtype in DTYPES:
        try:
            backends.add(choose_backend("tree_attention", device, dtype))
        except BackendError:  # a forced backend that cannot serve this dtype: the call will say so
            continue
    return backends


def _nodes(arrays: Sequence) -> list[Tensor]:
    if not isinstance(arrays, Sequence) or len(arrays) != len(NODE_ARRAYS):
        found = f"{len(arrays)} items" if isinstance(arrays, Sequence) else type(arrays).__name__
        raise ValueError(
            f"tree_attention: a tree is a PrefixTree, a TreePlan or ({', '.join(NODE_ARRAYS)}), got {found}"
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
        closed = []
        while open_nodes and open_nodes[-1] != parent[node]:
            closed.append(open_nodes.pop())
        message = f"node {node} has parent {parent[node]}: nodes must be depth-first, roots with parent -1"
        need(bool(open_nodes) or parent[node] == -1, message)
        for above in closed:
            close(above, rows)
        open_nodes.append(node)
        rows = end[node]
    for above in open_nodes:
        close(above, rows)
    need(rows < 2**31, f"{rows} rows; row numbers are 32-bit")
