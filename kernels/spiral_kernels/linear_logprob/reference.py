"""The truth: all logits, in float64, by plain differentiable torch."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_index: Tensor | None,
    temperature: float | Tensor,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, lse, entropy, each (R,) float64; gradients flow into hidden and weight in their own dtype."""
    rows = hidden if row_index is None else hidden[row_index]
    logits = rows.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[:, None]
    logits = logits / temperature
    lse = logits.logsumexp(1)
    logp = logits.gather(1, targets[:, None])[:, 0] - lse
    entropy = torch.special.entr((logits - lse[:, None]).exp()).sum(1)
    return logp, lse, entropy
