"""Paths against a dictionary of prefixes, cuts against all cuts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_fast.learner import sharing
from spiral_fast.learner.cost import Cost
from spiral_fast.learner.rows import Row
from spiral_fast.learner.sharing import cut, cut_flat, paths_of, tree_of

COST = Cost(per_token=3.0, per_pair=1.0, per_row=2.0)


def row(prompt: list[int], tokens: list[int]) -> Row:
    return Row(prompt, tokens, None, 1.0, 1.0, 0)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
ROWS = st.lists(st.builds(row, TOKENS, TOKENS), min_size=1, max_size=7)


def path(row: Row) -> list[int]:
    return row.prompt + row.tokens[:-1]


def prefixes(rows: list[Row], mode: str) -> list[list]:
    """For each row and computed token, what must be equal for it to be computed once."""
    found = []
    for index, row in enumerate(rows):
        keys = []
        for end in range(1, len(path(row)) + 1):
            key = tuple(path(row)[:end])
            in_prompt = end <= len(row.prompt)
            if mode == "none" or (mode == "set" and not in_prompt):
                key = index, key
            elif mode == "set":
                key = tuple(row.prompt), key
            keys.append(key)
        found.append(keys)
    return found


@pytest.mark.parametrize("mode", ["tree", "set", "none"])
@settings(deadline=None)
@given(ROWS)
def test_equal_ids_are_one_token_after_one_prefix(mode, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MIN_SHARED_RUN", 1)
        paths = paths_of(rows, mode)
    keys = prefixes(rows, mode)
    pairs = {(id, key) for ids, of in zip(paths.ids, keys, strict=True) for id, key in zip(ids, of, strict=True)}
    assert len(pairs) == len({id for id, _ in pairs}) == len({key for _, key in pairs}) == len(paths.token_of)
    for row, ids in zip(rows, paths.ids, strict=True):
        assert paths.token_of[ids].tolist() == path(row)


def computed(rows, keys, part) -> int:
    return len({key for i in part for key in keys[i]})


def best_cut(rows, keys, order, budget):
    """(tokens, parts, sum of squared FLOPs) of the best cut of the order, by trying all."""

    def score(parts):
        squares = 0.0
        for part in parts:
            seen = {key: depth for i in part for depth, key in enumerate(keys[i], 1)}
            squares += COST.flops(len(seen), sum(seen.values()), sum(len(rows[i].tokens) for i in part)) ** 2
        return sum(computed(rows, keys, part) for part in parts), len(parts), squares

    scores = []
    for n_cuts in range(len(order)):
        for cuts in combinations(range(1, len(order)), n_cuts):
            parts = [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True)]
            if all(len(part) == 1 or computed(rows, keys, part) <= budget for part in parts):
                scores.append(score(parts))
    return min(scores)


@pytest.mark.parametrize("mode", ["tree", "set", "none"])
@settings(deadline=None)
@given(ROWS, st.integers(1, 30))
def test_no_cut_of_the_depth_first_order_is_better(mode, rows, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MIN_SHARED_RUN", 1)
        paths = paths_of(rows, mode)
    keys = prefixes(rows, mode)
    parts = [part.rows for part in cut(rows, paths, budget, COST)]
    order = [i for part in parts for i in part]
    assert sorted(order) == list(range(len(rows)))
    tokens, n_parts, squares = best_cut(rows, keys, order, budget)
    trees = [tree_of(paths, part) for part in parts]
    assert (sum(tree.computed_tokens for tree in trees), len(parts)) == (tokens, n_parts)
    found = [
        COST.flops(tree.computed_tokens, tree.attention_area, sum(len(rows[i].tokens) for i in part))
        for tree, part in zip(trees, parts, strict=True)
    ]
    assert sum(f**2 for f in found) == pytest.approx(squares)
    for tree, part in zip(trees, parts, strict=True):
        for trace, i in zip(tree.trace_rows.split(tree.trace_offsets.diff().tolist()), part, strict=True):
            assert tree.tokens[trace].tolist() == path(rows[i])


@pytest.mark.parametrize("mode", ["tree", "none"])
@settings(deadline=None)
@given(ROWS, st.integers(1, 30), st.integers(1, 5))
def test_a_cut_for_ranks_gives_each_as_many_parts_where_there_are_rows(mode, rows, budget, times):
    """Parts of the cut for one rank are divided, nothing else changes; the FLOPs are those of the parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MIN_SHARED_RUN", 1)
        paths = paths_of(rows, mode)

    def parts_of(times):
        if mode == "none":
            return cut_flat(rows, budget, COST, times=times)
        return cut(rows, paths, budget, COST, times=times)

    whole, divided = parts_of(1), parts_of(times)
    assert [i for part in divided for i in part.rows] == [i for part in whole for i in part.rows]
    ends = [{sum(len(part.rows) for part in parts[: n + 1]) for n in range(len(parts))} for parts in (whole, divided)]
    assert ends[0] <= ends[1]
    assert len(divided) == min(len(rows), -(-len(whole) // times) * times)
    for part in divided:
        if mode == "none":
            flops = sum(COST.of_row(rows[i]) for i in part.rows)
        else:
            tree = tree_of(paths, part.rows)
            sampled = sum(len(rows[i].tokens) for i in part.rows)
            flops = COST.flops(tree.computed_tokens, tree.attention_area, sampled)
            assert tree.computed_tokens <= budget or len(part.rows) == 1
        assert part.flops == pytest.approx(flops)


def test_the_largest_part_is_divided_first_and_evenly():
    rows = [row([1], [2] * n) for n in (4, 4, 4, 4, 30, 31)]
    parts = cut_flat(rows, 1000, COST, times=3)
    assert [part.rows for part in parts] == [[0, 1, 2, 3], [4], [5]]


def test_chance_agreements_after_a_prompt_are_not_shared():
    rng = np.random.default_rng(0)
    prompt, long = rng.integers(0, 50, 40).tolist(), rng.integers(0, 50, 40).tolist()
    rows = [row(prompt, [7, 8, i, 9]) for i in range(6)] + [row(prompt, [*long, i, 9]) for i in range(2)]
    ids = paths_of(rows, "tree").ids
    assert all((ids[0][:40] == other[:40]).all() for other in ids[1:])
    for a, b in combinations(range(6), 2):
        assert not set(ids[a][40:]) & set(ids[b][40:])
    assert (ids[6][:80] == ids[7][:80]).all()


def test_prompts_are_shared_however_short():
    first, second = paths_of([row([1, 2, 3], [4, 5]), row([1, 2, 3], [6, 7])], "set").ids
    assert (first[:3] == second[:3]).all() and first[3] != second[3]


def test_a_part_shares_what_the_whole_batch_shares():
    """Without a third row there is no branch after the prompt, and a tree of its own would share a short run, too."""
    prompt = list(range(30))
    rows = [row(prompt, [1, 2, 3, 4]), row(prompt, [5, 6, 7]), row(prompt, [1, 2, 8, 9])]
    paths = paths_of(rows, "tree")
    assert tree_of(paths, [0, 2]).computed_tokens == len(set(paths.ids[0]) | set(paths.ids[2]))


def test_a_cut_is_made_where_the_fewest_tokens_repeat():
    """Two problems of three rows each in room for four: not 4 + 2 but 3 + 3."""
    rows = [row([problem] * 50, [problem, i]) for problem in (1, 2) for i in range(3)]
    parts = cut(rows, paths_of(rows, "tree"), 50 + 4 * 2, COST)
    assert [part.rows for part in parts] == [[0, 1, 2], [3, 4, 5]]


def test_of_equal_cuts_the_most_even_is_made():
    """Both parts compute the prompt, the second again."""
    rows = [row([1] * 50, [10 + i] * 11) for i in range(6)]
    assert [len(part.rows) for part in cut(rows, paths_of(rows, "tree"), 100, COST)] == [3, 3]
