"""Checkpoints and base in host memory: the same step to the bit. What it saves on a GPU: tests/plan/test_truth.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spiral_fast.config import ConfigError, ModelConfig, load_config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import load_model
from tests.learner.test_engine_agreement import sample
from tests.learner.tiny import RAGGED, config, gradient_of_step, largest_difference, loaded, make_rows, weights


@pytest.fixture
def one_rank():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


LONG = make_rows([(30, 1)], seed=1)[0].prompt
SHARED = [*RAGGED[:4], *(dataclasses.replace(row, prompt=LONG) for row in RAGGED[:4])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_checkpoints_give_the_same_gradient(dtype):
    found = []
    for changes in ({}, {"checkpointing": True}, {"checkpointing": True, "offload_checkpoints": True}):
        learner = Learner(config(micro_batch_tokens=60, self_check=False, **changes), loaded(dtype=dtype))
        found.append(gradient_of_step(learner, SHARED)[0])
    plain, checkpointed, offloaded = found
    assert largest_difference(checkpointed, offloaded) == largest_difference(plain, offloaded) == 0
    assert max(gradient.abs().max() for gradient in plain.values()) > 0


def test_layer_inputs_are_what_is_offloaded(monkeypatch):
    """One tensor a layer and micro-batch, of the hidden states' shape; the rotary tables that layers share stay."""
    packed = []

    class Noted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool):
            super().__init__(self.pack, lambda tensor: tensor)
            assert not pin_memory  # of CUDA alone

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel():  # the checkpoint of torch 2.11 also saves an empty tensor of its own
                packed.append(tuple(tensor.shape))
            return tensor

    monkeypatch.setattr("spiral_fast.learner.policy.save_on_cpu", Noted)
    learner = Learner(config(checkpointing=True, offload_checkpoints=True, self_check=False), loaded())
    stats = gradient_of_step(learner, [row for row in RAGGED if row.level == 0])[1]
    assert packed == [(1, stats.tokens_computed, 32)] * len(learner.policy.layers)


def demo_model(**options):
    torch.manual_seed(0)
    parts = load_model(ModelConfig(path="builtin:parts", dtype="float32"), "cpu", **options)
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return parts


def test_an_offloaded_base_makes_the_same_steps_and_traces(one_rank):
    found = []
    for options in ({}, {"shard": True}, {"shard": True, "offload_base": True}):
        parts = demo_model(**options)
        changes = {"fsdp": bool(options), "offload_base": "offload_base" in options}
        learner = Learner(config(micro_batch_tokens=60, self_check=False, **changes), parts)
        norms, rows = [], []
        for _ in range(2):
            prompts = [row.prompt for row in RAGGED[:2]]
            rows += sample(learner, parts.model, parts.eos_token_ids, prompts, 1.0, new_tokens=8)
            norms.append(learner.step(SHARED).gradient_norm)
        found.append((norms, weights(learner), [(row.tokens, row.rollout_logp.tolist()) for row in rows]))
    plain, sharded, offloaded = found
    for norms, after, traces in (sharded, offloaded):
        assert norms == plain[0] and traces == plain[2]
        assert largest_difference(after, plain[1]) == 0


@pytest.mark.parametrize("offload_base", [False, True])
def test_one_rank_samples_from_the_shards_themselves(one_rank, offload_base):
    """No second copy: inside rollout_weights each parameter is its shard's own memory, and stays so while the engine
    and the learner run forwards."""
    parts = demo_model(shard=True, offload_base=offload_base)
    learner = Learner(config(fsdp=True, offload_base=offload_base), parts)

    def addresses() -> dict[str, int]:
        named = parts.model.named_parameters(remove_duplicate=False)
        return {name: (p.to_local() if isinstance(p, DTensor) else p).data_ptr() for name, p in named}

    before = addresses()
    for _ in range(2):
        outside = learner.log_probs(RAGGED)
        with learner.rollout_weights():
            assert not any(isinstance(parameter, DTensor) for parameter in learner.policy.parameters())
            inside = learner.log_probs(RAGGED)
            assert addresses() == before
        assert all((a == b).all() for a, b in zip(inside, outside, strict=True))
        learner.policy.reshard()  # after a forward outside the root group is whole
        assert addresses() == before
        learner.step(RAGGED)
    assert any(isinstance(parameter, DTensor) for parameter in learner.policy.parameters())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.offload_checkpoints=true", "learner.offload_checkpoints: True .* needs learner.checkpointing: true"),
        ("learner.offload_base=true", "learner.offload_base: True .* needs learner.fsdp: true"),
    ],
)
def test_what_an_offload_needs_is_named(override, words):
    with pytest.raises(ConfigError, match=words):
        load_config("configs/demo.yaml", [override])
