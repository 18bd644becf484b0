"""theta searches, phi aggregates: each row under its own adapter, which alone it trains (paper, Appendix B)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.packed import pack
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.learner.roles import Roles
from spiral_fast.trace import AGGREGATION, SEARCH
from tests.learner.tiny import (
    CONTEXT,
    RAGGED,
    adapter,
    base_model,
    config,
    gradient_of_step,
    largest_difference,
    loaded,
    make_rows,
    plain_log_probs,
    plain_loss,
    weights,
)

NAMES = ("search", "aggregation")


def plain_two(dtype: torch.dtype = torch.float64) -> PeftModel:
    """peft's own layers with two adapters of other weights: the truth."""
    base = base_model("qwen3", dtype)
    base.set_attn_implementation("plain")
    lora = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, adapter_name="search", autocast_adapter_dtype=False).eval()
    model.add_adapter("aggregation", lora, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in adapter(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
            parameter.requires_grad_()
    return model


def loaded_two(dtype: torch.dtype = torch.float64) -> LoadedModel:
    model = plain_two(dtype)
    fuse_lora(model)
    model.get_base_model().set_attn_implementation(ATTENTION)
    return LoadedModel(model, None, frozenset([1]), CONTEXT)


def role_of(row) -> str:
    return NAMES[row.level > SEARCH]


def true_gradient(rows, temperature: float, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Row by row with peft's own switch of adapters, by autograd."""
    model = plain_two(dtype)
    total = {name: torch.zeros_like(parameter) for name, parameter in adapter(model)}
    for row in rows:
        model.set_adapter(role_of(row))  # which also freezes the other
        parameters = {name: p for name, p in adapter(model) if p.requires_grad}
        assert parameters and all(f".{role_of(row)}." in name for name in parameters)
        found = torch.autograd.grad(plain_loss(model, [row], temperature), list(parameters.values()))
        for name, gradient in zip(parameters, found, strict=True):
            total[name] += gradient
    return total


def of(role: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if f".{role}." in name}


def norm(values: dict[str, torch.Tensor]) -> float:
    return torch.cat([value.double().flatten() for value in values.values()]).norm().item()


SHARE_A_PROMPT = [  # each aggregation row has the prompt of the search row before it: no tree may merge them
    replace(row, prompt=RAGGED[i - row.level].prompt) for i, row in enumerate(RAGGED)
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sharing, checkpointing", [("none", False), ("tree", False), ("tree", True)])
def test_each_adapter_gets_the_gradient_of_its_own_rows(sharing, checkpointing, dtype, tolerance):
    settings = config(0.7, sharing=sharing, checkpointing=checkpointing, micro_batch_tokens=30, self_check=True)
    found, stats = gradient_of_step(Learner(settings, loaded_two(dtype)), SHARE_A_PROMPT)
    expected = true_gradient(SHARE_A_PROMPT, 0.7, dtype)
    assert largest_difference(found, expected) < tolerance
    for role, value in zip(NAMES, (stats.search_gradient_norm, stats.aggregation_gradient_norm), strict=True):
        assert value == pytest.approx(norm(of(role, expected)), rel=1e-5)
    assert stats.gradient_norm == pytest.approx(norm(expected), rel=1e-5)
    assert stats.gradient_cosine is None


def test_the_clip_is_over_both_together():
    settings = config(1.0, clip_norm=0.01)
    found, stats = gradient_of_step(Learner(settings, loaded_two()), RAGGED)
    assert stats.clipped and norm(found) == pytest.approx(0.01, rel=1e-9)
    expected = true_gradient(RAGGED, 1.0)
    for role in NAMES:  # one factor for both
        assert norm(of(role, found)) / norm(of(role, expected)) == pytest.approx(stats.clip_factor, rel=1e-9)


@pytest.mark.parametrize("level", [SEARCH, AGGREGATION, 2])
def test_without_live_rows_an_adapter_and_its_moments_stay(level):
    learner = Learner(config(weight_decay=0.1), loaded_two())
    learner.step(RAGGED)  # both have moments now
    before = weights(learner)
    moments = {name: learner.optimiser.state[p]["exp_avg"].clone() for name, p in learner.parameters.items()}
    stats = learner.step([replace(row, level=level) for row in RAGGED])
    assert stats.skipped_reason is None and stats.policy_version == 2
    trained, kept = NAMES if level == SEARCH else NAMES[::-1]
    after = weights(learner)
    for name, p in learner.parameters.items():
        same = torch.equal(before[name], after[name])
        same_moments = torch.equal(moments[name], learner.optimiser.state[p]["exp_avg"])
        assert same == same_moments == (f".{kept}." in name)
    assert norm(of(trained, after)) != norm(of(trained, before))


def test_log_probs_are_of_each_rows_own_adapter():
    learner, truth = Learner(config(0.7), loaded_two()), plain_two()
    for row, found in zip(SHARE_A_PROMPT, learner.log_probs(SHARE_A_PROMPT), strict=True):
        truth.set_adapter(role_of(row))
        np.testing.assert_allclose(found, plain_log_probs(truth, row, 0.7).detach(), rtol=0, atol=1e-12)


def test_the_warm_start_trains_each_on_its_own_examples():
    learner = Learner(config(beta1=0.0, beta2=0.0), loaded_two())
    search = [row for row in RAGGED if row.level == SEARCH]
    before = weights(learner)
    learner.supervised_step(search, 1e-3)
    assert largest_difference(of("aggregation", before), of("aggregation", weights(learner))) == 0
    losses = [learner.supervised_step(RAGGED, 1e-2) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("change", ["search", "aggregation"])
def test_a_layer_computed_again_in_the_backward_has_the_adapter_of_its_forward(change):
    """Another adapter is active when autograd comes to it, and the other's weights are not numbers."""
    other = NAMES[1 - NAMES.index(change)]
    row = RAGGED[0]
    gradients = []
    for checkpointing in (False, True):
        parts = loaded_two()
        learner = Learner(config(checkpointing=checkpointing), parts)
        with torch.no_grad():
            for parameter in of(other, learner.parameters).values():
                parameter.fill_(torch.nan)
        logp = learner.policy(pack([(row.prompt, row.tokens)], role=change), 1.0).logp
        with parts.roles.serving(other):
            logp.sum().backward()
            assert parts.roles.active == other  # what ran again has put it back
        gradients.append({name: p.grad for name, p in of(change, learner.parameters).items()})
        assert all(p.grad is None for p in of(other, learner.parameters).values())
    assert largest_difference(*gradients) == 0


def test_a_forward_that_fails_leaves_the_adapter_that_was_active():
    roles = Roles(NAMES)
    with pytest.raises(ZeroDivisionError), roles.serving("aggregation"):
        assert roles.active == "aggregation"
        1 / 0  # noqa: B018
    assert roles.active == "search"


def test_checkpoint_is_two_adapters_for_peft_alone_and_restores_bit_for_bit(tmp_path):
    learner = Learner(config(), loaded_two())
    learner.step(RAGGED)
    learner.save(tmp_path)
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()} == {
        *(f"{name}/adapter_{part}" for name in NAMES for part in ("config.json", "model.safetensors")),
        *("optimizer.safetensors", "learner.json"),
    }
    base = base_model("qwen3")
    base.set_attn_implementation("plain")
    alone = PeftModel.from_pretrained(base, tmp_path / "search", adapter_name="search", autocast_adapter_dtype=False)
    alone.load_adapter(tmp_path / "aggregation", "aggregation", autocast_adapter_dtype=False)
    for row, logp in zip(RAGGED, learner.log_probs(RAGGED), strict=True):
        alone.set_adapter(role_of(row))
        np.testing.assert_allclose(logp, plain_log_probs(alone, row, 1.0).detach(), rtol=0, atol=1e-12)
    other = Learner(config(), loaded_two())
    with torch.no_grad():
        for parameter in other.parameters.values():
            parameter.zero_()
    other.restore(tmp_path)
    for _ in range(2):
        assert largest_difference(weights(learner), weights(other)) == 0
        rows = make_rows([(4, 6), (7, 5), (3, 3)], seed=5)
        assert learner.step(rows) == other.step(rows)


def test_checkpoint_of_the_other_policy_is_refused(tmp_path):
    one, two = Learner(config(), loaded()), Learner(config(), loaded_two())
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    with pytest.raises(ConfigError, match="^[^\n]*'.*/one' holds one adapter: it is of model.policy: shared$"):
        two.restore(tmp_path / "one")
    with pytest.raises(ConfigError, match="^[^\n]*/two' holds an adapter for search and .*policy: two_adapters$"):
        one.restore(tmp_path / "two")
    (tmp_path / "two" / "search" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds aggregation alone; two_adapters needs search and aggregation$"):
        two.restore(tmp_path / "two")


def test_policy_source_has_both(tmp_path):
    parts = loaded_two(torch.float32)
    source, truth = PolicySource(parts), plain_two(torch.float32)
    Learner(config(), parts).save(tmp_path)
    for name in NAMES:
        saved, sent = load_file(tmp_path / name / "adapter_model.safetensors"), source.adapter(name)
        assert saved.keys() == sent.tensors.keys()
        assert all(torch.equal(saved[key], sent.tensors[key]) for key in saved)
        truth.set_adapter(name)
        expected = plain_log_probs(truth, RAGGED[0], 0.7).detach()
        found = source.log_probs(RAGGED[0].prompt, RAGGED[0].tokens, 0.7, name)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert parts.roles.active == "search"
