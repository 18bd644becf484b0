"""The policy: log-probabilities of sampled tokens under decoder, adapter and head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spiral_fast.learner.packed import Packed
from spiral_kernels.linear_logprob import LogProbs, linear_logprob


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

    def forward(self, packed: Packed, temperature: float, return_entropy: bool = False) -> LogProbs:
        """Log-probs at `temperature` (logits divided by it) of packed.targets: LogProbs(logp (R,), entropy, lse)."""
        causal_lm = self.model.get_base_model()
        hidden = causal_lm.get_decoder()(
            input_ids=packed.tokens, position_ids=packed.positions, use_cache=False, attend=packed.attend
        ).last_hidden_state
        return linear_logprob(
            hidden[0],
            causal_lm.get_output_embeddings().weight,
            packed.targets,
            row_index=packed.row_index,
            temperature=temperature,
            return_entropy=return_entropy,
        )


def _checkpointed(forward: Callable) -> Callable:
    def run(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
