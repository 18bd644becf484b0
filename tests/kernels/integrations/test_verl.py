"""linear_for_ppo against verl's formula in float64, and against verl's own code where verl is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from spiral_kernels.integrations import head
from spiral_kernels.integrations.verl import linear_for_ppo, use_linear_logprob
from spiral_kernels.linear_logprob import LogProbs

VOCABULARY = 53


def inputs(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, shape, generator=generator)


def formula(hidden, weight, ids, temperature):
    """log softmax and entropy of hidden @ weight.T / temperature, written out in float64."""
    logits = hidden.double() @ weight.double().T / torch.as_tensor(temperature, dtype=torch.float64).unsqueeze(-1)
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return p.gather(-1, ids[..., None]).squeeze(-1).log(), -(p * p.log()).sum(-1)


def gradients(function, hidden, weight, ids, temperature, entropy_coef):
    """Values, and the gradients of a loss in which each log-prob and each entropy has a factor of its own."""
    logp, entropy = function(hidden, weight, ids, temperature)
    factor = torch.linspace(-1, 1, logp.numel(), dtype=logp.dtype).view(logp.shape)
    total = (factor * logp).sum() - (entropy_coef * factor.flip(0) * entropy).sum()
    return logp, entropy, *torch.autograd.grad(total, [x for x in (hidden, weight) if x.requires_grad])


@pytest.mark.parametrize("shape", [(7,), (2, 5), (3, 1)])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_formula(shape, entropy_coef, temperature):
    arguments = inputs(shape)
    found = gradients(linear_for_ppo, *arguments, temperature, entropy_coef)
    expected = gradients(formula, *arguments, temperature, entropy_coef)
    for ours, truth in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == truth.shape
        torch.testing.assert_close(ours, truth.float(), rtol=1e-5, atol=1e-5)


def test_float64_is_exact():
    arguments = inputs((2, 5), torch.float64)
    found, expected = (gradients(f, *arguments, 0.7, 0.3) for f in (linear_for_ppo, formula))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_temperature_for_each_token():
    hidden, weight, ids = inputs((2, 5))
    temperature = torch.linspace(0.5, 2, 10).view(2, 5)
    found, expected = (gradients(f, hidden, weight, ids, temperature, 0.3) for f in (linear_for_ppo, formula))
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth.float(), rtol=1e-5, atol=1e-5)


def test_frozen_head_int32_ids_and_no_grad():
    hidden, weight, ids = inputs((2, 5))
    weight.requires_grad_(False)
    logp, entropy, d_hidden = gradients(linear_for_ppo, hidden, weight, ids.int(), 1.0, 0.3)
    *_, expected = gradients(formula, hidden, weight, ids, 1.0, 0.3)
    torch.testing.assert_close(d_hidden, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not any(x.requires_grad for x in linear_for_ppo(hidden, weight, ids))


def test_autocast_takes_its_dtype():
    hidden, weight, ids = inputs((2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(linear_for_ppo, hidden, weight, ids, 1.0, 0.3)
    rounded = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    torch.testing.assert_close(found[:2], gradients(linear_for_ppo, *rounded, ids, 1.0, 0.3)[:2], rtol=0, atol=0)
    assert found[2].dtype == torch.float32


def test_shapes_that_do_not_fit():
    hidden, weight, ids = inputs((2, 5))
    with pytest.raises(ValueError, match=r"one id per hidden state, got \(2, 4\), hidden_states \(2, 5, 8\)"):
        linear_for_ppo(hidden, weight, ids[:, 1:])


def zeros(hidden, weight, targets, **_):
    nothing = 0 * hidden.sum() * torch.ones(len(targets))
    return LogProbs(nothing, nothing.detach(), nothing.detach())


def test_the_answer_is_ours(monkeypatch):
    """With zeros for our log-probs the comparison with the formula fails."""
    monkeypatch.setattr(head, "linear_logprob", zeros)
    with pytest.raises(AssertionError):
        test_equals_the_formula((2, 5), 0.0, 1.0)


@pytest.fixture
def verl(monkeypatch):
    """The modules of verl that score a micro-batch, without the rest of it, which imports ray."""
    found = importlib.util.find_spec("verl")
    if found is None:
        pytest.skip("verl is not installed: its own code was not compared; pip install --no-deps verl")
    folder = Path(found.origin).parent
    for package in ("verl", "verl.utils", "verl.utils.experimental", "verl.models", "verl.models.transformers"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    modules = []
    for name in ("verl.utils.experimental.torch_functional", "verl.models.transformers.dense_common"):
        spec = importlib.util.spec_from_file_location(name, folder.parent / f"{name.replace('.', '/')}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        modules.append(module)
    return modules


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_equals_verls_own_forward(verl, monkeypatch, entropy_coef):
    """verl's forward of a transformers model, as its actor calls it; gradients of all weights."""
    torch_functional, dense_common = verl
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.15}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads))
    ids = torch.randint(VOCABULARY, (2, 9))

    def run():
        output = dense_common.forward_with_torch_backend(model, input_ids=ids, temperature=0.7, return_dict=True)
        factor = torch.linspace(-1, 1, 18).view(2, 9)
        total = (factor * output.log_probs).sum() - entropy_coef * (factor.flip(0) * output.entropy).sum()
        return output.log_probs, output.entropy, *torch.autograd.grad(total, list(model.parameters()))

    expected = run()
    monkeypatch.setattr(torch_functional.FusedLinearForPPO, "forward", torch_functional.FusedLinearForPPO.forward)
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    (code,) = re.findall(r"^```python\n(from spiral_kernels.integrations.verl .*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(code, {})
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=2e-6)
    monkeypatch.setattr(head, "linear_logprob", zeros)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(), expected, rtol=1e-5, atol=2e-6)


def test_verl_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError):
        use_linear_logprob()
