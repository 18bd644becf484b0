"""Engine and learner in turns in one process: keys and values are gone while the learner works."""

from __future__ import annotations

import gc
import weakref

import torch

from spiral_fast.learner.learner import Learner
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.train import train
from tests.learner.test_engine_agreement import RAGGED, generate
from tests.learner.tiny import loaded
from tests.test_train import small

FEW = 16  # slots of an empty pool


def test_set_policy_frees_keys_and_values():
    """Every tensor of the pool, at once and not when the garbage collector comes."""
    from spiral_fast.rollout.engine import Request
    from spiral_fast.trace import TraceKey

    parts = loaded(dtype=torch.float32)
    engine = RadixEngine(
        parts.causal_lm, parts.eos_token_ids, max_context=256, max_running=8, prefill_chunk=64, cache_tokens=4096
    )
    requests = [Request(TraceKey("p", 0, -1, i), tuple(row.prompt), 12, 1.0, seed=i) for i, row in enumerate(RAGGED)]
    gc.disable()
    try:
        generate(engine, requests)
        held = [tensor.untyped_storage() for tensor in [*engine._pool.keys, *engine._pool.values]]
        assert sum(storage.nbytes() for storage in held) > 50 * 2 * 2 * 2 * 8 * 4  # 50 tokens in two layers
        gone = [weakref.ref(storage) for storage in held]
        del held
        assert all(storage() is not None for storage in gone)
        engine.set_policy(1)
        assert all(storage() is None for storage in gone)
    finally:
        gc.enable()
    assert len(engine._pool.keys[0]) <= FEW
    engine.close()


def test_no_run_learns_beside_a_full_cache(tmp_path, monkeypatch):
    slots = []
    accumulate = Learner.accumulate

    def noted(learner, rows):
        slots.extend(len(pool.keys[0]) for pool in gc.get_objects() if type(pool) is Pool)
        return accumulate(learner, rows)

    monkeypatch.setattr(Learner, "accumulate", noted)
    train(small(tmp_path / "run", "learner.steps=1", "warm_start.steps=0", "record.writers=[]"))
    assert slots and max(slots) <= FEW
