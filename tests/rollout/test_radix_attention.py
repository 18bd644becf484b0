"""Prefill and decode attention over the pool against dense causal attention, float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.rollout.radix import prefill
from spiral_fast.rollout.radix.decode import DecodeBatch
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.rollout.radix.prefill import Chunk, Run, chunks

HEAD_DIM, SCALE = 8, 0.3
HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, key heads
CPU = torch.device("cpu")


def dense(query, keys, values):
    """One query (Hq, D) over keys, values (n, Hkv, D)."""
    g = query.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(g, 1) for x in (keys, values))
    weight = (torch.einsum("hd,nhd->hn", query, keys) * SCALE).softmax(-1)
    return torch.einsum("hn,nhd->hd", weight, values)


def new_pool(kv_heads: int, capacity: int = 4000) -> Pool:
    return Pool(1, kv_heads, HEAD_DIM, capacity, torch.float64, CPU)


def model_order(x):
    """(T, heads, D) -> (1, heads, T, D), as the model passes it."""
    return x.transpose(0, 1)[None]


@pytest.mark.parametrize("piece", [1024, 5])
@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("q_heads,kv_heads", HEADS)
def test_prefill(q_heads, kv_heads, chunk, piece, monkeypatch):
    monkeypatch.setattr(prefill, "_PIECE", piece)
    torch.manual_seed(0)
    pool = new_pool(kv_heads)
    lengths = {"a": 1, "b": 17, "c": 3, "d": 40, "e": 2}  # each below the one named in `above`: a tree three deep
    above = {"a": None, "b": "a", "c": "b", "d": "b", "e": "d"}
    paths, runs, keys, values = {}, [], {}, {}
    for name, n in lengths.items():
        own = pool.allocate(n)
        paths[name] = np.concatenate([paths[above[name]], own]) if above[name] else own
        runs.append(Run(np.arange(n), paths[name]))
    total = sum(lengths.values())
    query = torch.randn(total, q_heads, HEAD_DIM, dtype=torch.float64)
    key, value = (torch.randn(total, kv_heads, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    first = 0
    expected = []
    for name, n in lengths.items():
        before = above[name]
        keys[name] = torch.cat([keys[before], key[first : first + n]]) if before else key[:n]
        values[name] = torch.cat([values[before], value[first : first + n]]) if before else value[:n]
        for i in range(n):
            seen = len(paths[name]) - n + i + 1
            expected.append(dense(query[first + i], keys[name][:seen], values[name][:seen]))
        first += n
    out, first = [], 0
    for part in chunks(runs, chunk):
        attend = Chunk(pool, part, CPU)
        n = len(attend.tokens)
        assert n <= chunk
        slices = (model_order(x[first : first + n]) for x in (query, key, value))
        out.append(attend.attend(0, *slices, SCALE)[0])
        first += n
    assert first == total
    torch.testing.assert_close(torch.cat(out), torch.stack(expected), rtol=0, atol=1e-12)


def test_a_run_that_is_not_written_leaves_the_pool_alone():
    pool = new_pool(2)
    slots = pool.allocate(5)
    key = torch.randn(5, 2, HEAD_DIM, dtype=torch.float64)
    pool.write(0, torch.from_numpy(slots), key, key)
    before = pool.keys[0][1:].clone()
    chunk = Chunk(pool, [(Run(np.array([4]), slots, write=False), 0, 1)], CPU)
    query = torch.randn(1, 2, HEAD_DIM, dtype=torch.float64)
    out = chunk.attend(0, model_order(query), model_order(key[-1:] + 1e-9), model_order(key[-1:]), SCALE)
    torch.testing.assert_close(out[0, 0], dense(query[0], key, key), rtol=0, atol=1e-12)
    assert torch.equal(pool.keys[0][1:], before)


@pytest.mark.parametrize("lengths", [[9, 9, 9], [1, 5, 200, 14, 600]])
@pytest.mark.parametrize("q_heads,kv_heads", HEADS)
def test_decode(q_heads, kv_heads, lengths):
    """Groups of several sizes come and go; prompts of several length bands; own parts of several lengths."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    pool = new_pool(kv_heads)
    batch = DecodeBatch(pool)
    history: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values each row sees

    def draw(n, heads):
        return torch.randn(n, heads, HEAD_DIM, dtype=torch.float64)

    def admit(sizes):
        paths = []
        for length, members in zip(lengths, sizes, strict=True):
            slots = pool.allocate(length)
            key, value = draw(length, kv_heads), draw(length, kv_heads)
            pool.write(0, torch.from_numpy(slots), key, value)
            paths.append(slots)
            history.extend([(key, value)] * members)
        batch.add(paths, list(sizes), np.full(sum(sizes), 64))

    def step():
        rows = len(batch)
        assert rows == len(history)
        batch.begin_step()
        query, key, value = draw(rows, q_heads), draw(rows, kv_heads), draw(rows, kv_heads)
        for r in range(rows):
            history[r] = torch.cat([history[r][0], key[r : r + 1]]), torch.cat([history[r][1], value[r : r + 1]])
        out = batch.attend(0, *(model_order(x) for x in (query, key, value)), SCALE)[0]
        expected = torch.stack([dense(query[r], *history[r]) for r in range(rows)])
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    def drop(rows):
        alive = np.ones(len(batch), bool)
        alive[rows] = False
        left = int(alive.sum())
        source, target = left + np.flatnonzero(alive[left:]), np.flatnonzero(~alive[:left])
        for s, t in zip(source, target, strict=True):
            history[t] = history[s]
        del history[left:]
        batch.remove((source, target), left)

    admit(rng.integers(1, 5, len(lengths)))
    for _ in range(3):
        step()
    admit(rng.integers(1, 4, len(lengths)))
    for _ in range(34):  # past the first buffer
        step()
    while len(batch) > 1:
        drop(rng.choice(len(batch), min(len(batch) - 1, 3), replace=False))
        step()
    drop([0])
    admit([2] * len(lengths))
    step()
