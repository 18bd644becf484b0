"""The adapter added into the weights it is put on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Rounding:
    """What storing the merged weights in the model's dtype did to the update they hold."""

    dtype: torch.dtype
    lost: float  # |rounding error| / |update|, Frobenius norms over all merged weights; 0 where there is no update


@torch.no_grad()
def merge(model: PeftModel) -> tuple[PreTrainedModel, Rounding]:
    """The plain transformers model with weights W + alpha / r B A (computed in float32 or finer, then rounded to the
    dtype of W). `model` is used up."""
    dtype, error, update = torch.float32, 0.0, 0.0
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        (name,) = module.active_adapters
        weight, a, b = module.base_layer.weight, module.lora_A[name].weight, module.lora_B[name].weight
        delta = module.scaling[name] * (b @ a)
        exact = weight + delta  # promoted to the finer of the two
        weight.copy_(exact)
        dtype = weight.dtype
        error += (weight - exact).double().square().sum().item()
        update += delta.double().square().sum().item()
    return model.unload(), Rounding(dtype, (error / update) ** 0.5 if update else 0.0)
