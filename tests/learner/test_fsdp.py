"""FSDP needs a process group, so this runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import dataclasses, json, sys
import torch
from torch.distributed.tensor import DTensor
from peft import PeftModel
from spiral_fast.learner.learner import Learner
from tests.learner.test_engine_agreement import largest_gap, sample
from tests.learner.tiny import *

folder = sys.argv[1]
plain = Learner(config(micro_batch_tokens=40), loaded(dtype=torch.float32))
parts = loaded(dtype=torch.float32)
sharded = Learner(config(micro_batch_tokens=40, fsdp=True, checkpointing=True), parts)
prompts = [row.prompt for row in RAGGED]

def base_alone_is_sharded():
    return all(isinstance(p, DTensor) != p.requires_grad for p in sharded.policy.parameters())

out = {"sharded": base_alone_is_sharded(), "norms": [], "engine": []}
out["engine"].append(float(largest_gap(sharded, sample(sharded, parts.model, parts.eos_token_ids, prompts, 1.0))))
long = make_rows([(30, 1)], seed=1)[0].prompt
shared = [*RAGGED, *(dataclasses.replace(row, prompt=long) for row in RAGGED)]
for _ in range(2):
    steps = [learner.step(shared) for learner in (plain, sharded)]
    out["norms"].append([stats.gradient_norm for stats in steps])
    out["computed"] = [stats.tokens_computed for stats in steps] + [sum(row.computed_tokens for row in shared)]
    rows = sample(sharded, parts.model, parts.eos_token_ids, prompts, 1.0)
    out["engine"].append(float(largest_gap(sharded, rows)))
with sharded.rollout_weights():
    out["whole"] = not any(isinstance(p, DTensor) for p in sharded.policy.parameters())
out["sharded_again"] = base_alone_is_sharded()
out["weights"] = largest_difference(weights(sharded), weights(plain))
sharded.save(folder)
again = Learner(config(fsdp=True, micro_batch_tokens=40), loaded(dtype=torch.float32, seed=0))
again.restore(folder)
out["resumed"] = [vars(learner.step(RAGGED)) for learner in (sharded, again)]
model = PeftModel.from_pretrained(plain.policy.model.get_base_model(), folder)  # plain peft reads what was saved
print(json.dumps(out))
"""


def test_same_update_as_without(tmp_path):
    """Without torchrun; with it: test_ranks.py."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "step")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["sharded"] and out["whole"] and out["sharded_again"]
    for plain, sharded in out["norms"]:
        assert sharded == pytest.approx(plain, rel=1e-6)
    assert out["computed"][0] == out["computed"][1] < out["computed"][2] - 30  # trees
    assert out["weights"] <= 1e-6
    assert max(out["engine"]) < 1e-4
    assert out["resumed"][0] == out["resumed"][1]
