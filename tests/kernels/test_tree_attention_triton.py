"""The Triton kernels of tree_attention without a GPU: tiles by brute force, values in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from spiral_kernels.tree_attention import triton_tiles
from spiral_kernels.tree_attention.triton_tiles import plan_tiles
from tests.interpreter import needs_interpreter
from tests.kernels.tree_nodes import nodes_of


def random_nodes(generator: np.random.Generator, n_nodes: int, longest: int) -> tuple[torch.Tensor, ...]:
    path, parents = [], []
    for node in range(n_nodes):
        depth = generator.integers(len(path) + 1)
        parents.append(path[depth - 1] if depth else -1)
        path = [*path[:depth], node]
    return nodes_of(parents, generator.integers(1, longest + 1, n_nodes).tolist())


def visible_in_tiles(nodes, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(tiles of queries, tiles of keys): whether any pair is visible and whether all are; no row sees past the last."""
    start, end, _, subtree_end = (array.numpy() for array in nodes)
    until, rows = np.repeat(subtree_end, end - start), int(end[-1])
    query, key = np.arange(-(-rows // block_q) * block_q), np.arange(-(-rows // block_k) * block_k)
    until = np.pad(until, (0, len(key) - rows))
    pairs = (key <= query[:, None]) & (query[:, None] < until)
    tiles = pairs.reshape(len(query) // block_q, block_q, len(key) // block_k, block_k)
    return tiles.any((1, 3)), tiles.all((1, 3))


def check(nodes) -> triton_tiles.Tiles:
    tiles = plan_tiles(*nodes)
    assert all(tensor.dtype == torch.int32 for tensor in tiles)

    some, full = visible_in_tiles(nodes, *triton_tiles.LISTED)
    found = np.zeros((2, *some.shape), int)
    for tile, full_begin, full_end, masked_begin, masked_end in tiles.queries.tolist():
        np.add.at(found[0, tile], tiles.full[full_begin:full_end].numpy(), 1)
        np.add.at(found[1, tile], tiles.masked[masked_begin:masked_end].numpy(), 1)
    assert (found[0] == full).all() and (found[1] == some & ~full).all()
    work = some.sum(1)[tiles.queries[:, 0].numpy()]
    assert len(work) == len(some) and (np.diff(work) <= 0).all()

    some, full = visible_in_tiles(nodes, *triton_tiles.SPANNED)
    found = np.zeros((2, *some.shape), int)
    for tile, first, end, full_first, full_end in tiles.keys.tolist():
        assert first <= full_first <= full_end <= end and first < end
        found[0, first:end, tile] += 1
        found[1, full_first:full_end, tile] += 1
    assert (found[0] == some).all() and (found[1] == full).all()
    check_parts(tiles, some.sum(0))
    return tiles


def check_parts(tiles: triton_tiles.Tiles, work: np.ndarray) -> None:
    limit = max(triton_tiles.LEAST_SPLIT, work.sum() // triton_tiles.MOST_SHARES)
    keys, n_parts = tiles.keys.numpy(), len(tiles.parts)
    assert (keys[:, 2] - keys[:, 1] <= limit).all()
    number = 0
    while number < n_parts:
        here = keys[number : number + int(tiles.parts[number])]
        assert len(here) > 1 and len(set(here[:, 0])) == 1 and work[here[0, 0]] > limit
        assert (here[1:, 1] == here[:-1, 2]).all()
        assert not tiles.parts[number + 1 : number + len(here)].any()
        number += len(here)
    assert number == n_parts
    whole = keys[n_parts:]
    assert len(set(whole[:, 0])) == len(whole) and (np.diff(whole[:, 2] - whole[:, 1]) <= 0).all()


@pytest.mark.parametrize("blocks", [((4, 2), (2, 4)), ((3, 5), (5, 3)), ((8, 8), (1, 1)), ((1, 1), (8, 8))])
def test_tiles_hold_each_visible_pair_once(monkeypatch, blocks):
    monkeypatch.setattr(triton_tiles, "LISTED", blocks[0])
    monkeypatch.setattr(triton_tiles, "SPANNED", blocks[1])
    monkeypatch.setattr(triton_tiles, "MOST_SHARES", 8)
    monkeypatch.setattr(triton_tiles, "LEAST_SPLIT", 3)
    generator = np.random.default_rng(0)
    n_split = 0
    for _ in range(60):
        tiles = check(random_nodes(generator, int(generator.integers(1, 25)), int(generator.choice((1, 3, 12)))))
        n_split += len(tiles.parts)
    assert n_split > 0


@pytest.mark.parametrize("length", (1, 2, 127, 128, 129, 300))
def test_tiles_as_the_kernels_have_them(length):
    check(nodes_of([-1], [length]))
    check(nodes_of([-1, 0, 0, -1], [length, 200, 64, length]))


def test_tiles_of_many_bands():
    """More tiles of queries than are transposed at a time."""
    nodes = nodes_of([-1, 0, 0, 2, 2, -1], [9000, 12000, 700, 8000, 6000, 5000])
    tiles = plan_tiles(*nodes)
    until = np.repeat(nodes[3].numpy(), (nodes[1] - nodes[0]).numpy())
    first_key = np.arange(0, len(until), 64)
    last = np.maximum.reduceat(until, first_key)
    for tile, full_begin, full_end, masked_begin, masked_end in tiles.queries.tolist():
        listed = sorted([*tiles.full[full_begin:full_end].tolist(), *tiles.masked[masked_begin:masked_end].tolist()])
        assert listed == np.flatnonzero((first_key < (tile + 1) * 128) & (last > tile * 128)).tolist()


def test_no_rows_no_tiles():
    empty = torch.zeros(0, dtype=torch.int64)
    assert [tuple(tensor.shape) for tensor in plan_tiles(*[empty] * 4)] == [(0, 5), (0,), (0,), (0, 5), (0,)]


def test_what_rounding_to_tiles_costs_in_spirals_shape():
    """The figures in the docstring of triton_tiles.py: one problem, lengths spread evenly over 512..4096."""
    lengths = [512 + 1543 * i % 3585 for i in range(24)]  # 8 search traces, 16 aggregation traces
    parents, lengths, aggregations = [-1, *[0] * 8], [256, *lengths[:8]], lengths[8:]
    for i in range(4):
        parents += [0, *[len(parents)] * 4]
        lengths += [sum(lengths[1 + j] for j in range(8) if (j + i) % 2), *aggregations[4 * i : 4 * i + 4]]
    nodes = nodes_of(parents, lengths)
    tiles = plan_tiles(*nodes)
    above = [0]
    for node in range(1, len(parents)):
        above.append(above[parents[node]] + lengths[parents[node]])
    area = sum(n * before + n * (n + 1) // 2 for n, before in zip(lengths, above, strict=True))
    (q, k), (spanned_q, spanned_k) = triton_tiles.LISTED, triton_tiles.SPANNED
    listed = (len(tiles.full) + len(tiles.masked)) * q * k
    spanned = int((tiles.keys[:, 2] - tiles.keys[:, 1]).sum()) * spanned_q * spanned_k

    assert sum(lengths) == 81302
    assert round(listed / area, 2) == 1.03 and round(spanned / area, 2) == 1.03
    assert round(len(tiles.full) * q * k / listed, 2) == 0.94


@needs_interpreter
@pytest.mark.timeout(600)
def test_values_in_the_interpreter():
    """Cases of their own and those of test_tree_attention.py; the interpreter is chosen when a process starts."""
    files = ("interpreted_tree_attention.py", "test_tree_attention.py")
    cases = "interpreted or (triton and (strides or compiled or float32 and heads0))"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", cases]
        + [str(Path(__file__).with_name(name)) for name in files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout and "skipped" not in run.stdout, run.stdout
