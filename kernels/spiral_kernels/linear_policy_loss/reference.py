"""The truth: all logits in float64, then policy_loss's truth with every row a sequence of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.linear_logprob import reference as head
from spiral_kernels.policy_loss import reference as loss_of_logp
from spiral_kernels.policy_loss.losses import Settings
from spiral_kernels.policy_loss.packed import Masks

MASKED = 4  # of policy_loss's statistics, not one of linear_policy_loss's


def linear_policy_loss(
    of_head: tuple,
    advantages: Tensor,
    rollout_logp: Tensor,
    token_weight: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    settings: Settings,
    token_mask: tuple[float, float],
    entropy_coef: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss (), logp (R,), entropy (R,), statistics (5,), float64; gradients flow into hidden and weight by autograd.

    of_head: linear_logprob's arguments.
    """
    hidden, weight, bias, targets, row_index, temperature, soft_cap = of_head
    kept = token_weight.nonzero()[:, 0]  # the rows that count
    if isinstance(temperature, Tensor):
        temperature = temperature[kept]
    source = kept if row_index is None else row_index[kept]
    logp, _, entropy = head.linear_logprob(hidden, weight, bias, targets[kept], source, temperature, soft_cap)
    total, statistics = loss_of_logp.policy_loss(
        logp,
        rollout_logp[kept],
        advantages[kept],
        torch.arange(len(kept) + 1),
        None if old_logp is None else old_logp[kept],
        None if ref_logp is None else ref_logp[kept],
        token_weight[kept],
        settings,
        Masks(*token_mask, 0.0, torch.inf, torch.inf),
    )
    if entropy_coef != 0:
        total = total - entropy_coef * (token_weight[kept].double() * entropy).sum()
    logp, entropy = (logp.new_zeros(targets.shape).index_copy(0, kept, x.detach()) for x in (logp, entropy))
    return total, logp, entropy, torch.cat([statistics[:MASKED], statistics[MASKED + 1 :]])
