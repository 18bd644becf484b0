from __future__ import annotations

import pytest
import torch

from spiral_fast.config import ConfigError
from spiral_fast.plan.budget import check_budget, refuse
from tests.plan.test_simulated import config_of
from tests.plan.test_work import SHAPE

BASE, ADAPTER = SHAPE.base_bytes, SHAPE.adapter_bytes


def test_the_embedded_cache_is_part_of_the_budget():
    """Base, adapter and moments beside the cache: to the byte."""
    config = config_of("rollout.engine=radix", "rollout.cache_tokens=100000")
    needed = BASE + 3 * ADAPTER + 100_000 * SHAPE.kv_bytes
    refuse(config, SHAPE, needed, 1)
    with pytest.raises(ConfigError, match=r"^rollout.cache_tokens: 100000: .* lower it below 99999$") as error:
        refuse(config, SHAPE, needed - 1, 1)
    assert "base weights 8.0 + adapter 0.3 + optimiser moments 0.5 + KV cache 14.7 GB" in str(error.value)
    refuse(config_of("rollout.engine=radix", "rollout.cache_tokens=99999"), SHAPE, needed - SHAPE.kv_bytes, 1)


def test_more_ranks_hold_less_of_the_base_but_gather_it_to_sample():
    config = config_of("rollout.engine=radix", "rollout.cache_tokens=1000", "learner.fsdp=true")
    refuse(config, SHAPE, int(1.25 * BASE + 3 * ADAPTER + 1000 * SHAPE.kv_bytes), 4)
    with pytest.raises(ConfigError, match="^model.path: .*base weights 10.1 .* during rollout"):
        refuse(config, SHAPE, int(1.2 * BASE + 3 * ADAPTER), 4)


def test_a_model_that_is_too_large():
    with pytest.raises(ConfigError, match="^model.path: .* during learning .*offload_base=true") as error:
        refuse(config_of("rollout.engine=sglang"), SHAPE, 8 * 10**9, 1)
    assert "\n" not in str(error.value)
    refuse(config_of("rollout.engine=sglang", "learner.fsdp=true", "learner.offload_base=true"), SHAPE, 8 * 10**9, 1)


def test_nothing_is_asked_for_on_the_cpu():
    before = torch.get_rng_state()
    check_budget(config_of("model.path=nowhere/at-all"), "cpu")
    assert torch.equal(before, torch.get_rng_state())
