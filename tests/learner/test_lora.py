from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from spiral_fast.config import ConfigError
from spiral_fast.learner.lora import LoraLinear, fuse_lora
from tests.learner.tiny import adapter, plain_peft


@pytest.mark.parametrize("bias", [True, False])
def test_gradient(bias):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, grad=True):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)

    x, a, b = draw(7, 5), draw(3, 5), draw(4, 3)
    weight, offset = draw(4, 5, grad=False), draw(4, grad=False) if bias else None
    assert torch.autograd.gradcheck(lambda x, a, b: LoraLinear.apply(x, weight, offset, a, b, 0.7), (x, a, b))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_same_function_as_peft(family):
    ids = torch.arange(12)[None]
    ours, theirs = plain_peft(family), plain_peft(family)
    fuse_lora(ours)
    outputs = [model(input_ids=ids, use_cache=False).logits for model in (ours, theirs)]
    assert torch.allclose(*outputs, atol=1e-12, rtol=0)
    for logits in outputs:
        logits.sin().sum().backward()
    for (name, p), (_, q) in zip(adapter(ours), adapter(theirs), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-11, rtol=0), name
    with ours.disable_adapter(), theirs.disable_adapter():
        without = [model(input_ids=ids, use_cache=False).logits for model in (ours, theirs)]
    assert torch.equal(*without) and not torch.allclose(without[0], outputs[0])


def test_bf16_base_with_float32_adapter_stays_near_the_exact_result():
    generator = torch.Generator().manual_seed(0)
    x, weight, a, b, dy = (
        torch.randn(s, generator=generator) for s in ((64, 32), (48, 32), (8, 32), (48, 8), (64, 48))
    )
    x, weight, dy = x.bfloat16(), weight.bfloat16(), dy.bfloat16()

    def run(cast, adapter_dtype):
        leaves = [cast(x).detach().requires_grad_(), *(t.to(adapter_dtype).requires_grad_() for t in (a, b))]
        y = LoraLinear.apply(leaves[0], cast(weight), None, leaves[1], leaves[2], 0.5)
        return [y, *torch.autograd.grad(y, leaves, cast(dy))]

    half, exact = run(lambda t: t, torch.float32), run(lambda t: t.double(), torch.float64)
    assert [t.dtype for t in half] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for ours, truth in zip(half, exact, strict=True):
        assert (ours.double() - truth).norm() < 1e-2 * truth.norm()


def test_layers_that_are_not_linear_are_refused():
    model = get_peft_model(torch.nn.Sequential(torch.nn.Embedding(4, 3)), LoraConfig(target_modules=["0"]))
    with pytest.raises(ConfigError, match="model.lora.target_modules: .* is a Embedding"):
        fuse_lora(model)
