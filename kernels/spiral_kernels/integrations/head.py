"""Log-probs and entropies of a head that both carry gradients, as other trainers' losses expect them."""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.linear_logprob import linear_logprob
from spiral_kernels.linear_policy_loss import linear_policy_loss


def logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    row_index: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    **head: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """(R,) and (R,) as `linear_logprob` gives them (its arguments and errors; `head`: bias, soft_cap), nats.

    The gradient of the log-probs is linear_logprob's. That of the entropies costs two or three more GEMMs in a
    backward that reaches them, and nothing otherwise.
    """
    settings = {"row_index": row_index, "temperature": temperature, **head}
    logp, entropy, _ = linear_logprob(hidden, weight, targets, return_entropy=True, **settings)
    return logp, _Entropy.apply(hidden, weight, entropy, targets, settings)


def head_dtype(hidden: Tensor) -> torch.dtype:
    """What a linear layer on `hidden` would compute in: the dtype of autocast where that is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _Entropy(torch.autograd.Function):
    """Gives `entropy` its gradient by hidden and weight: that of an entropy bonus without a surrogate."""

    @staticmethod
    def forward(ctx, hidden, weight, entropy, targets, settings):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.settings = settings
        return entropy.clone()

    @staticmethod
    def backward(ctx, d_entropy):
        hidden, weight, targets = ctx.saved_tensors
        need = ctx.needs_input_grad[:2]
        inputs = [x.detach().requires_grad_(needed) for x, needed in zip((hidden, weight), need, strict=True)]
        zeros = torch.zeros_like(d_entropy)
        with torch.enable_grad():
            total = linear_policy_loss(
                *inputs, targets, zeros, zeros, -d_entropy, loss="reinforce", entropy_coef=1.0, **ctx.settings
            ).loss
        gradients = iter(torch.autograd.grad(total, [x for x in inputs if x.requires_grad]))
        return *(next(gradients) if needed else None for needed in need), None, None, None
