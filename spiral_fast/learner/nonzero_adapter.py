"""Adapters that do something, for as long as a check needs them: a fresh adapter's B matrices are zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from spiral_fast.learner import fsdp
from spiral_fast.learner.quantise import weight_of

SHARE = 0.05  # of the frozen weight's norm that the update's norm has: plain to see, and the model stays a model


@contextmanager
def nonzero_adapter(model: PeftModel, seed: int) -> Iterator[None]:
    """Within: each B drawn from `seed`, |scaling B A| = SHARE |W| in Frobenius norm. After: the adapters' old bits.

    The model may be sharded meanwhile, at world size 1.
    """
    before = {name: matrix.clone() for name, matrix in _matrices(model)}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                _draw(layer, generator)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, matrix in _matrices(model):
                matrix.copy_(before[name])


def _draw(layer: LoraLayer, generator: torch.Generator) -> None:
    for adapter in layer.lora_A:
        a, b = (fsdp.local(part[adapter].weight.detach()) for part in (layer.lora_A, layer.lora_B))
        weight = fsdp.local(weight_of(layer.base_layer).detach())
        b.copy_(torch.randn(b.shape, generator=generator))
        norm = ((b.T @ b) * (a @ a.T)).sum().sqrt() * layer.scaling[adapter]  # |B A|^2 = tr(A^T B^T B A)
        b.mul_(SHARE * torch.linalg.vector_norm(weight, dtype=torch.float32) / norm)


def _matrices(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            yield name, fsdp.local(parameter.detach())
