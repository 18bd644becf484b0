from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spiral_fast.learner.rows import micro_batches
from tests.learner.tiny import make_rows

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=30)


@given(LENGTHS, st.integers(1, 100))
def test_each_row_once_shortest_first_within_the_budget(lengths, budget):
    rows = make_rows(lengths)
    parts = micro_batches(rows, budget)
    order = [index for part in parts for index in part]
    assert order == sorted(range(len(rows)), key=lambda index: rows[index].computed_tokens)
    sizes = [sum(rows[index].computed_tokens for index in part) for part in parts]
    assert all(size <= budget or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    # no part is closed while the next row still fits
    for size, following in zip(sizes, parts[1:], strict=False):
        assert size + rows[following[0]].computed_tokens > budget
