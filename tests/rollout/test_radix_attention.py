"""Prefill and decode attention over the pool against dense causal attention, float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.path_attention import Group, PathAttention, native_missing
from spiral_fast.rollout.radix import prefill
from spiral_fast.rollout.radix.decode_copies import CopiedPrompts
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.rollout.radix.prefill import Chunk, Run, chunks
from spiral_fast.rollout.radix.runs import shared_runs
from spiral_fast.rollout.radix.tree import RadixTree

InPlace = None
if native_missing() is None:
    from spiral_fast.rollout.radix.decode_in_place import InPlace

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
@pytest.mark.parametrize("dtype,error", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("q_heads,kv_heads", HEADS)
def test_prefill(q_heads, kv_heads, dtype, error, chunk, piece, monkeypatch):
    """In plain torch in float64, by the native kernel in the others."""
    monkeypatch.setattr(prefill, "_PIECE", piece)
    torch.manual_seed(0)
    pool = Pool(1, kv_heads, HEAD_DIM, 4000, dtype, CPU)
    lengths = {"a": 1, "b": 17, "c": 3, "d": 40, "e": 2}  # each below the one named in `above`: a tree three deep
    above = {"a": None, "b": "a", "c": "b", "d": "b", "e": "d"}
    paths, runs, keys, values = {}, [], {}, {}
    for name, n in lengths.items():
        own = pool.allocate(n)
        paths[name] = np.concatenate([paths[above[name]], own]) if above[name] else own
        runs.append(Run(np.arange(n), paths[name]))
    total = sum(lengths.values())
    query = torch.randn(total, q_heads, HEAD_DIM).to(dtype)
    key, value = (torch.randn(total, kv_heads, HEAD_DIM).to(dtype) for _ in range(2))
    first = 0
    expected = []
    for name, n in lengths.items():
        before = above[name]
        keys[name] = torch.cat([keys[before], key[first : first + n]]) if before else key[:n]
        values[name] = torch.cat([values[before], value[first : first + n]]) if before else value[:n]
        for i in range(n):
            seen = len(paths[name]) - n + i + 1
            expected.append(dense(*(x.double() for x in (query[first + i], keys[name][:seen], values[name][:seen]))))
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
    torch.testing.assert_close(torch.cat(out).double(), torch.stack(expected), rtol=error, atol=error)


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


def tree_prompts(tree, pool, lengths, draw):
    """New prompts in chains of three, each below the one before: their nodes, keys and values."""
    found, made = {}, []
    for i, length in enumerate(lengths):
        above = made[-1] if i % 3 else None
        key, value = draw(length), draw(length)
        slots = pool.allocate(length)
        pool.write(0, torch.from_numpy(slots), key, value)
        tokens = np.full(length, len(tree.roots["default"].children))  # another first token than all children's
        if above:
            node = tree.extend(above, tokens, slots)
            key, value = (torch.cat([a, b]) for a, b in zip(found[above], (key, value), strict=True))
        else:
            node = tree.extend(tree.roots["default"], tokens, slots)
        found[node] = key, value
        made.append(node)
    return found


BATCHES = {
    "in place float32": (InPlace, torch.float32, 2e-6),
    "in place bfloat16": (InPlace, torch.bfloat16, 4e-3),
    "copies float64": (CopiedPrompts, torch.float64, 1e-12),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("lengths", [[9, 9, 9], [1, 5, 200, 14, 600]])
@pytest.mark.parametrize("q_heads,kv_heads,head_dim", [(4, 4, 8), (4, 2, 64), (6, 1, 24)])
def test_decode(q_heads, kv_heads, head_dim, lengths, kind):
    """Groups of several sizes come and go; prompts of several length bands; own parts of several lengths."""
    batch_class, dtype, error = BATCHES[kind]
    if batch_class is None:
        pytest.skip("spiral_kernels._native is not built")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    pool = Pool(1, kv_heads, head_dim, 6000, dtype, CPU)
    batch = batch_class(pool)
    tree = RadixTree()
    history: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values each row sees

    def draw(n, heads=kv_heads):
        return torch.randn(n, heads, head_dim, dtype=torch.float64).to(dtype)

    def admit(sizes):
        prompts = tree_prompts(tree, pool, lengths, draw)
        for seen, members in zip(prompts.values(), sizes, strict=True):
            history.extend([seen] * members)
        batch.add(list(prompts), list(sizes), np.full(sum(sizes), 64))

    def step():
        rows = len(batch)
        assert rows == len(history)
        batch.begin_step()
        query, key, value = draw(rows, q_heads), draw(rows), draw(rows)
        for r in range(rows):
            history[r] = torch.cat([history[r][0], key[r : r + 1]]), torch.cat([history[r][1], value[r : r + 1]])
        out = batch.attend(0, *(model_order(x) for x in (query, key, value)), SCALE)[0]
        assert out.dtype == dtype
        expected = torch.stack([dense(query[r].double(), *(x.double() for x in history[r])) for r in range(rows)])
        torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)

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


@pytest.mark.skipif(InPlace is None, reason="spiral_kernels._native is not built")
def test_a_row_gives_its_own_slots_back_and_never_takes_more_than_its_limit():
    pool = Pool(1, 1, 8, 200, torch.float32, CPU)
    batch = InPlace(pool)
    prompts = tree_prompts(RadixTree(), pool, [5], lambda n: torch.zeros(n, 1, 8))
    batch.add(list(prompts), [2], np.array([70, 3]))
    for _ in range(3):
        batch.begin_step()
    assert pool.held == 5 + 32 + 3
    batch.remove((np.empty(0, int), np.empty(0, int)), 1)  # the second row leaves
    for _ in range(66):
        batch.begin_step()
    assert pool.held == 5 + 70
    batch.remove((np.empty(0, int), np.empty(0, int)), 0)
    assert pool.held == 5


@pytest.mark.skipif(InPlace is None, reason="spiral_kernels._native is not built")
@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "base"])
def test_decode_with_every_instruction_set(instruction_set):
    from spiral_kernels import _native

    before = _native.instruction_set()
    try:
        _native.use_instruction_set(instruction_set)
    except ValueError:
        pytest.skip("this processor lacks it")
    try:
        test_decode(6, 2, 40, [1, 5, 200, 14], "in place float32")
        test_decode(4, 2, 64, [70, 5], "in place bfloat16")
    finally:
        _native.use_instruction_set(before)


@pytest.mark.skipif(InPlace is None, reason="spiral_kernels._native is not built")
@pytest.mark.parametrize("dtype,error", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_rows_of_a_group_see_prefixes_in_any_order(dtype, error):
    """More rows than share a pass, the longest prefix first, in the middle or last; one token to four tiles."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    query, keys, values = (torch.randn(n, heads, 24).to(dtype) for n, heads in ((110, 6), (300, 2), (300, 2)))
    rows = rng.permutation(110)
    groups = []
    for at, n in ((rows[:70], 230), (rows[70:], 65)):
        groups.append(Group(rng.permutation(300)[:n], at, rng.integers(1, n + 1, len(at))))
    groups[0].visible[[0, 40]] = 230, 1
    out = PathAttention(groups).attend(query, keys, values, SCALE)
    for slots, at, visible in groups:
        for row, n in zip(at, visible, strict=True):
            seen = torch.from_numpy(slots[:n])
            expected = dense(*(x.double() for x in (query[row], keys[seen], values[seen])))
            torch.testing.assert_close(out[row].double(), expected, rtol=error, atol=error)


@pytest.mark.parametrize("seed", range(20))
def test_shared_runs_against_brute_force(seed):
    """Each token of each prompt in one run, in order; a run's rows are those with it; no two runs could be one."""
    rng = np.random.default_rng(seed)
    tree = RadixTree()
    slot = iter(range(1, 10**6))
    nodes, prompts = [], []
    for _ in range(rng.integers(1, 12)):
        tokens = rng.integers(0, 2, rng.integers(1, 12))
        node, matched = tree.find(tokens)
        if matched < len(tokens):
            node = tree.extend(node, tokens[matched:], np.array([next(slot) for _ in tokens[matched:]]))
        nodes.append(node)
    rows = [nodes[i] for i in rng.integers(0, len(nodes), rng.integers(1, 20))]
    prompts = [node.path_slots().tolist() for node in rows]
    slots, below, places = shared_runs(rows)
    runs = [slots.values[a:b].tolist() for a, b in zip(slots.offsets, slots.offsets[1:], strict=False)]
    of_run = [set(below.values[a:b].tolist()) for a, b in zip(below.offsets, below.offsets[1:], strict=False)]
    run_at = np.repeat(np.arange(len(runs)), np.diff(below.offsets))
    for row, prompt in enumerate(prompts):
        mine = places.values[places.offsets[row] : places.offsets[row + 1]]
        assert (below.values[mine] == row).all()
        assert [s for place in mine for s in runs[run_at[place]]] == prompt
    for run, who in zip(runs, of_run, strict=True):
        assert who == {row for row, prompt in enumerate(prompts) if run[0] in prompt}
    read = sum(map(len, runs))
    assert read == len({s for prompt in prompts for s in prompt})  # every shared slot once
    assert len({frozenset(who) for who in of_run}) == len(of_run)
