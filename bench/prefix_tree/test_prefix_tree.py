"""`pytest bench/prefix_tree --benchmark-only`: one problem of SPIRAL's shape through every builder."""

from __future__ import annotations

import pytest

from bench.prefix_tree.peers import builders
from bench.prefix_tree.run import same_rows
from bench.prefix_tree.shapes import spiral


@pytest.mark.parametrize("name", builders())
def test_prefix_tree(benchmark, name):
    batch = spiral(1)
    benchmark.extra_info["tokens"] = len(batch.tokens)
    _, rows = benchmark.pedantic(builders()[name], (batch,), rounds=3, warmup_rounds=1)
    assert same_rows(rows, next(iter(builders().values()))(batch)[1])
