"""FLOPs of a tiny Llama, counted by hand."""

from __future__ import annotations

import dataclasses

from spiral_fast.learner.cost import cost_of
from spiral_fast.learner.packed import pack
from spiral_fast.learner.sharing import paths_of
from spiral_fast.learner.trees import pack_tree
from tests.learner.tiny import loaded, make_rows


def test_of_a_model():
    cost = cost_of(loaded("llama").model)
    frozen = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)  # layers * (q, k and v, o, the MLP's three)
    adapter = 2 * 4 * (64 + 2 * 48 + 64 + 3 * 80)  # layers * rank * (in + out of each)
    assert cost.per_token == 2 * 2 * frozen + 3 * 2 * adapter
    assert cost.per_pair == 2 * 4 * 8 * (2 * 2 + 4 * 2)  # layers * heads * size * two products, four in the backward
    assert cost.per_row == 2 * 2 * 50 * 32


def test_of_rows_and_of_what_is_computed():
    cost = cost_of(loaded("llama").model)
    row, other = make_rows([(20, 9), (20, 5)])
    other = dataclasses.replace(other, prompt=row.prompt)
    alone = [cost.flops(28, 28 * 29 // 2, 9), cost.flops(24, 24 * 25 // 2, 5)]
    assert [cost.of_row(row), cost.of_row(other)] == alone
    assert cost.of_packed(pack([(r.prompt, r.tokens) for r in (row, other)])) == sum(alone)
    shared = pack_tree([row, other], paths_of([row, other], "tree"), [0, 1])
    assert cost.of_packed(shared) == sum(alone) - cost.flops(20, 20 * 21 // 2, 0)
