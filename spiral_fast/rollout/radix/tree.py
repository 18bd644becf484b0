"""The radix tree of cached prompts: which slots of the pool hold the keys and values of which token prefix.

Each edge is a run of tokens; one slot per token. Every prompt ends at the end of a node (a run is split where needed),
so that a node can keep the hidden state of its last token. Needs no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


class Node:
    """A run of tokens below `parent`. A node always ends at the same prefix: splitting puts a new node above it."""

    __slots__ = ("tokens", "slots", "parent", "children", "pins", "last_used", "hidden")

    def __init__(self, tokens: np.ndarray, slots: np.ndarray, parent: Node | None):
        self.tokens = tokens  # (n,) int64
        self.slots = slots  # (n,) int64, slot of each token in the pool
        self.parent = parent
        self.children: dict[int, Node] = {}  # by first token
        self.pins = 0  # uses by requests; a pinned node and its ancestors stay
        self.last_used = 0
        self.hidden = None  # the decoder's output at the last token (H,), where a prompt ended here

    def path_slots(self) -> np.ndarray:
        """Slots of the whole prefix that ends here, in token order."""
        runs, node = [], self
        while node.parent is not None:
            runs.append(node.slots)
            node = node.parent
        return np.concatenate(runs[::-1]) if runs else np.empty(0, np.int64)


class RadixTree:
    """Prefixes of one policy version: below a root for each adapter, since another has other keys and values."""

    def __init__(self, adapters: Sequence[str] = ("default",)):
        nothing = np.empty(0, np.int64)
        self.roots = {adapter: Node(nothing, nothing, None) for adapter in adapters}
        self.size = 0  # tokens held
        self._clock = 0

    def find(self, tokens: Sequence[int], adapter: str = "default") -> tuple[Node, int]:
        """The node that ends at the longest prefix of `tokens` cached for the adapter, and that prefix's length."""
        tokens = np.asarray(tokens, np.int64)
        self._clock += 1
        node, length = self.roots[adapter], 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            rest = tokens[length : length + len(child.tokens)]
            differs = np.flatnonzero(rest != child.tokens[: len(rest)])
            shared = int(differs[0]) if len(differs) else len(rest)
            node = child if shared == len(child.tokens) else self._split(child, shared)
            node.last_used = self._clock
            length += shared
            if node is not child:
                break
        return node, length

    def extend(self, node: Node, tokens: Sequence[int], slots: np.ndarray) -> Node:
        """A new child of `node` for tokens that `find` did not match; returns it."""
        child = Node(np.asarray(tokens, np.int64), slots, node)
        child.last_used = self._clock
        node.children[int(child.tokens[0])] = child
        self.size += len(child.tokens)
        return child

    def evict(self, count: int) -> np.ndarray:
        """Drop unpinned nodes, leaves first, least recently used first, until `count` tokens are freed. Their slots."""
        leaves = [(node.last_used, id(node), node) for node in self._nodes() if not node.children and not node.pins]
        heapq.heapify(leaves)
        freed: list[np.ndarray] = []
        while leaves and count > 0:
            node = heapq.heappop(leaves)[2]
            del node.parent.children[int(node.tokens[0])]
            freed.append(node.slots)
            count -= len(node.slots)
            self.size -= len(node.slots)
            parent = node.parent
            if parent.parent is not None and not parent.children and not parent.pins:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return np.concatenate(freed) if freed else np.empty(0, np.int64)

    def _split(self, node: Node, at: int) -> Node:
        """A new node for the first `at` tokens of `node`, which keeps the rest and its age."""
        head = Node(node.tokens[:at], node.slots[:at], node.parent)
        head.children[int(node.tokens[at])] = node
        node.parent.children[int(node.tokens[0])] = head
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], head
        return head

    def _nodes(self):
        stack = [node for root in self.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
