"""The truth: all logits, in float64, by plain differentiable torch."""

from __future__ import annotations

import torch


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_index: torch.Tensor | None,
    temperature: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, lse, entropy, each (R,) float64; gradients flow into hidden and weight in their own dtype."""
    rows = hidden if row_index is None else hidden[row_index]
    logits = rows.double() @ weight.double().t()
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[:, None]
    logits = logits / temperature
    lse = logits.logsumexp(1)
    logp = logits.gather(1, targets[:, None])[:, 0] - lse
    entropy = torch.special.entr((logits - lse[:, None]).exp()).sum(1)
    return logp, lse, entropy
