from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel

from spiral_fast.learner.learner import Learner
from tests.learner.tiny import (
    RAGGED,
    base_model,
    config,
    largest_difference,
    loaded,
    make_rows,
    plain_log_probs,
    weights,
)

SETTINGS = dict(weight_decay=0.1, warmup_steps=3)


def test_plain_peft_loads_the_adapter(tmp_path):
    learner = Learner(config(), loaded())
    learner.step(RAGGED)
    learner.save(tmp_path / "step_1")
    base = base_model("qwen3")
    base.set_attn_implementation("plain")
    model = PeftModel.from_pretrained(base, tmp_path / "step_1", autocast_adapter_dtype=False).eval()
    for row, logp in zip(RAGGED, learner.log_probs(RAGGED), strict=True):
        np.testing.assert_allclose(logp, plain_log_probs(model, row, 1.0).detach(), atol=1e-12, rtol=0)


def test_the_config_of_the_adapter_is_the_same_in_every_process(tmp_path):
    """peft keeps the module names in a set, whose order differs from process to process."""
    Learner(config(), loaded()).save(tmp_path / "step_0")
    names = json.loads((tmp_path / "step_0" / "adapter_config.json").read_text())["target_modules"]
    assert len(names) > 4 and names == sorted(names)


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    batches = [make_rows([(5, 7), (9, 4), (3, 8)], seed) for seed in range(4)]
    unbroken = Learner(config(**SETTINGS), loaded())
    for rows in batches:
        last = unbroken.step(rows)
    first = Learner(config(**SETTINGS), loaded())
    for rows in batches[:2]:
        first.step(rows)
    first.save(tmp_path / "step_2")
    second = Learner(config(**SETTINGS), loaded(seed=5))
    base = {n: p.detach() for n, p in first.policy.named_parameters() if "lora_" not in n}
    second.policy.load_state_dict(base, strict=False)
    second.step(RAGGED)  # whatever it had must be gone
    second.restore(tmp_path / "step_2")
    assert second.policy_version == 2
    for rows in batches[2:]:
        stats = second.step(rows)
    assert stats == last
    assert largest_difference(weights(second), weights(unbroken)) == 0


def test_saving_before_any_step_restores_a_fresh_optimiser(tmp_path):
    fresh = Learner(config(), loaded())
    fresh.save(tmp_path / "step_0")
    other = Learner(config(), loaded())
    other.step(RAGGED)
    other.restore(tmp_path / "step_0")
    assert other.step(RAGGED) == fresh.step(RAGGED)
    assert largest_difference(weights(other), weights(fresh)) == 0


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    learner = Learner(config(), loaded())
    learner.save(tmp_path / "step_1")
    other = loaded("llama")
    for name, parameter in other.model.named_parameters():
        if "lora_A" in name:
            parameter.data = torch.zeros(7, parameter.shape[1], dtype=parameter.dtype)
    with pytest.raises(ValueError, match="lora_A.* has shape"):
        Learner(config(), other).restore(tmp_path / "step_1")
