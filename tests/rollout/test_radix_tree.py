"""The radix tree against a set of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_fast.rollout.radix.tree import Node, RadixTree

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class Slots:
    """Hands out slots; taking one twice, or giving back one that is not out, fails."""

    def __init__(self):
        self.out: set[int] = set()
        self.next = 1

    def take(self, count: int) -> np.ndarray:
        slots = np.arange(self.next, self.next + count)
        self.next += count
        self.out |= set(slots.tolist())
        return slots

    def give_back(self, slots: np.ndarray) -> None:
        assert len(set(slots.tolist())) == len(slots) and set(slots.tolist()) <= self.out
        self.out -= set(slots.tolist())


def insert(tree: RadixTree, slots: Slots, prompt: list[int]) -> tuple[Node, int]:
    node, matched = tree.find(prompt)
    if matched < len(prompt):
        node = tree.extend(node, prompt[matched:], slots.take(len(prompt) - matched))
    return node, matched


def held(tree: RadixTree) -> dict[tuple[int, ...], int]:
    """Every prefix in the tree and the slot of its last token."""
    found = {}

    def walk(node: Node, prefix: tuple[int, ...]) -> None:
        for child in node.children.values():
            path = prefix
            assert child.parent is node and len(child.tokens) == len(child.slots) > 0
            for token, slot in zip(child.tokens.tolist(), child.slots.tolist(), strict=True):
                path = (*path, token)
                found[path] = slot
            walk(child, path)

    walk(tree.roots["default"], ())
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["insert", "pin", "unpin", "evict"]), PROMPT, st.integers(1, 12)), max_size=30)
)
def test_tree_against_a_set_of_prefixes(actions):
    tree, slots = RadixTree(), Slots()
    prefixes: set[tuple[int, ...]] = set()
    pinned: list[tuple[Node, tuple[int, ...]]] = []
    for action, prompt, count in actions:
        if action == "unpin" and pinned:
            pinned.pop(0)[0].pins -= 1
        elif action == "evict":
            before = tree.size
            freed = tree.evict(count)
            slots.give_back(freed)
            left = held(tree)
            assert before - tree.size == len(freed) and set(left) <= prefixes
            assert all(path[:n] in left for _, path in pinned for n in range(1, len(path) + 1))
            needed = {path[:n] for _, path in pinned for n in range(1, len(path) + 1)}
            assert len(freed) >= min(count, before - len(needed))
            prefixes = set(left)
        else:
            expected = max((n for n in range(1, len(prompt) + 1) if tuple(prompt[:n]) in prefixes), default=0)
            node, matched = insert(tree, slots, prompt)
            assert matched == expected
            prefixes |= {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
            if action == "pin":
                node.pins += 1
                pinned.append((node, tuple(prompt)))
        now = held(tree)
        assert set(now) == prefixes and tree.size == len(prefixes)
        assert set(now.values()) == slots.out
        for node, path in pinned:
            assert node.path_slots().tolist() == [now[path[:n]] for n in range(1, len(path) + 1)]


def test_least_recently_used_leaves_go_first():
    tree, slots = RadixTree(), Slots()
    for prompt in ([1, 1, 1], [1, 1, 2], [2, 2]):
        insert(tree, slots, prompt)
    tree.find([1, 1, 1])
    tree.evict(1)
    assert set(held(tree)) == {(1,), (1, 1), (1, 1, 1), (2,), (2, 2)}
    tree.evict(1)
    assert set(held(tree)) == {(1,), (1, 1), (1, 1, 1)}


def test_only_the_part_of_a_run_that_was_found_becomes_young():
    tree, slots = RadixTree(), Slots()
    for prompt in ([1, 2, 3, 4], [5]):
        insert(tree, slots, prompt)
    tree.find([1, 2, 9])
    tree.evict(1)
    assert set(held(tree)) == {(1,), (1, 2), (5,)}
    tree.evict(1)
    assert set(held(tree)) == {(1,), (1, 2)}


def test_a_node_still_ends_at_its_prefix_after_a_split():
    tree, slots = RadixTree(), Slots()
    node, _ = insert(tree, slots, [1, 2, 3, 4])
    path = node.path_slots().tolist()
    head, matched = tree.find([1, 2, 9])
    assert matched == 2 and head.path_slots().tolist() == path[:2]
    assert node.path_slots().tolist() == path
