"""LoRA linear layers without needless passes: the same function as peft's, as one autograd node.

peft computes base(x) + scaling * B(A(x)) with one pass over the output each for the scaling, the sum and (bf16 base)
the casts; here the last GEMM adds into the first one's output.
"""

from __future__ import annotations

from functools import partial

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from spiral_fast.config import ConfigError
from spiral_fast.learner.quantise import is_quantised
from spiral_fast.learner.roles import Roles


class LoraLinear(torch.autograd.Function):
    """y (T, out) = x W^T + bias + scaling (x A^T) B^T for x (T, in), W (out, in) frozen, A (r, in), B (out, r) trained.

    A and B are used in x's dtype; their gradients are computed in x's dtype and returned in their own.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling):
        a_x, b_x = a.to(x.dtype), b.to(x.dtype)
        low = x @ a_x.T  # (T, r)
        y = torch.nn.functional.linear(x, weight, bias)
        y.addmm_(low, b_x.T, alpha=scaling)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, a, b, low = ctx.saved_tensors
        d_low = torch.mm(dy, b.to(dy.dtype)).mul_(ctx.scaling)  # (T, r)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
            dx.addmm_(d_low, a.to(dy.dtype))
        da = d_low.T @ x
        db = dy.T @ low
        return dx, None, None, da.to(a.dtype), db.to(b.dtype).mul_(ctx.scaling), None


def fuse_lora(model: PeftModel) -> None:
    """Give each LoRA layer of `model` the forward of LoraLinear, in place, under the adapter that `model.roles` (made
    here) has active. Engine and learner run the same layers.

    A quantised layer keeps its own forward and backward below the adapter's. Raises ConfigError for another layer that
    is not a plain linear one.
    """
    model.roles = roles = Roles(list(model.peft_config))
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if is_quantised(module.base_layer):
            module.forward = partial(_over_base, module, roles)
            continue
        if type(module.base_layer) is not torch.nn.Linear:
            kind = type(module.base_layer).__name__
            raise ConfigError(f"model.lora.target_modules: {name!r} is a {kind}; only linear layers take the adapter")
        module.forward = partial(_forward, module, roles)


def _forward(module: LoraLayer, roles: Roles, x: torch.Tensor) -> torch.Tensor:
    if module.disable_adapters:
        return module.base_layer(x)
    adapter = roles.active
    y = LoraLinear.apply(
        x.flatten(0, -2),
        module.base_layer.weight,
        module.base_layer.bias,
        module.lora_A[adapter].weight,
        module.lora_B[adapter].weight,
        module.scaling[adapter],
    )
    return y.unflatten(0, x.shape[:-1])


def _over_base(module: LoraLayer, roles: Roles, x: torch.Tensor) -> torch.Tensor:
    """peft's formula: the base layer's own function, whose gradient by x is its own too, plus the adapter's."""
    y = module.base_layer(x)
    if module.disable_adapters:
        return y
    a, b = (part[roles.active].weight.to(x.dtype) for part in (module.lora_A, module.lora_B))
    low = x.flatten(0, -2) @ a.T  # (T, r)
    return torch.addmm(y.flatten(0, -2), low, b.T, alpha=module.scaling[roles.active]).unflatten(0, x.shape[:-1])
