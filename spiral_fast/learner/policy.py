"""The policy: log-probabilities of sampled tokens under decoder, adapter and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spiral_fast.learner.packed import Packed
from spiral_kernels import LinearPolicyLoss, LogProbs, linear_logprob, linear_policy_loss


class TokenLoss(NamedTuple):
    """(R,) each, per sampled token: the loss is the sum of weight * -exp(logp - rollout_logp) * credit."""

    credit: torch.Tensor
    rollout_logp: torch.Tensor
    weight: torch.Tensor


class Policy(nn.Module):
    """Wraps the (peft) causal language model; the head is applied at sampled tokens only, no logits matrix is kept.

    A module of its own so that FSDP can own its forward.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_base_model().get_decoder().layers

    def checkpoint_layers(self) -> None:
        """Keep only each decoder layer's input; the backward computes the layer again."""
        for layer in self.layers:
            layer.forward = _checkpointed(layer.forward)

    def forward(self, packed: Packed, temperature: float, loss: TokenLoss | None = None) -> LogProbs | LinearPolicyLoss:
        """Log-probs at `temperature` (logits divided by it) of packed.targets, (R,) each; with `loss` also that loss,
        which then is what carries the gradient."""
        causal_lm = self.model.get_base_model()
        hidden = causal_lm.get_decoder()(
            input_ids=packed.tokens, position_ids=packed.positions, use_cache=False, attend=packed.attend
        ).last_hidden_state[0]
        head = causal_lm.get_output_embeddings().weight
        rows = dict(row_index=packed.row_index, temperature=temperature)
        if loss is None:
            return linear_logprob(hidden, head, packed.targets, **rows)
        return linear_policy_loss(hidden, head, packed.targets, *loss, **rows)


def _checkpointed(forward: Callable) -> Callable:
    def run(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
