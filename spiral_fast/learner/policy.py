"""The policy: log-probabilities of sampled tokens under decoder, adapter and head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from spiral_fast.batch_invariant import log_probs, run_decoder, same_paths
from spiral_fast.learner.packed import Packed
from spiral_fast.learner.roles import Roles
from spiral_kernels import LinearPolicyLoss, LogProbs, linear_logprob, linear_policy_loss


class TokenLoss(NamedTuple):
    """(R,) each, per sampled token: the loss is the sum of weight * -exp(logp - rollout_logp) * credit."""

    credit: torch.Tensor
    rollout_logp: torch.Tensor
    weight: torch.Tensor


class Policy(nn.Module):
    """Wraps the (peft) causal language model; the head is applied at sampled tokens only, no logits matrix is kept.

    A module of its own so that FSDP can own its forward. batch_invariant: a token's log-prob has the same bits whatever
    else is in the batch, those of an engine in the same mode.
    """

    def __init__(self, model: nn.Module, *, batch_invariant: bool = False):
        super().__init__()
        self.model = model
        self.roles: Roles = model.roles
        self.batch_invariant = batch_invariant

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_base_model().get_decoder().layers

    def checkpoint_layers(self, *, offload: bool = False) -> None:
        """Keep only each decoder layer's input; the backward computes the layer again. offload: keep it in host memory,
        pinned where the device is CUDA. Copies run on the compute stream: they take their time, the host does not wait.
        """
        for layer in self.layers:
            layer.forward = _checkpointed(layer.forward, self.roles, offload)

    def forward(self, packed: Packed, temperature: float, loss: TokenLoss | None = None) -> LogProbs | LinearPolicyLoss:
        """Log-probs at `temperature` (logits divided by it) of packed.targets, (R,) each, under the adapter
        packed.role; with `loss` also that loss, which then is what carries the gradient."""
        with self.roles.serving(packed.role):
            return self._under_role(packed, temperature, loss)

    def _under_role(self, packed: Packed, temperature: float, loss: TokenLoss | None) -> LogProbs | LinearPolicyLoss:
        causal_lm = self.model.get_base_model()
        if self.batch_invariant:
            return _batch_invariant(causal_lm, packed, temperature, loss)
        hidden = causal_lm.get_decoder()(
            input_ids=packed.tokens, position_ids=packed.positions, use_cache=False, attend=packed.attend
        ).last_hidden_state[0]
        head = causal_lm.get_output_embeddings().weight
        rows = dict(row_index=packed.row_index, temperature=temperature)
        if loss is None:
            return linear_logprob(hidden, head, packed.targets, **rows)
        return linear_policy_loss(hidden, head, packed.targets, *loss, **rows)


def _batch_invariant(
    causal_lm: nn.Module, packed: Packed, temperature: float, of: TokenLoss | None
) -> LogProbs | LinearPolicyLoss:
    tokens, positions = packed.tokens[0], packed.positions[0]
    hidden = run_decoder(causal_lm.get_decoder(), tokens, positions, same_paths(packed.attend))[packed.row_index]
    head = causal_lm.get_output_embeddings().weight
    temperatures = torch.full((len(hidden),), temperature, device=hidden.device)
    found = log_probs(hidden, head, packed.targets, temperatures, entropy=of is not None)
    if of is None:
        return found
    ratio = (found.logp - of.rollout_logp).exp()
    loss = -(of.weight.to(ratio.dtype) * ratio * of.credit.to(ratio.dtype)).sum()
    ratio, none = ratio.detach(), torch.zeros(())
    return LinearPolicyLoss(loss, found.logp.detach(), found.entropy, ratio.mean(), ratio.max(), none, none, none)


def _checkpointed(forward: Callable, roles: Roles, offload: bool) -> Callable:
    def run(hidden: torch.Tensor, **others):
        if not torch.is_grad_enabled():
            return forward(hidden, **others)
        # what the layers share (`others`: positions, rotary embeddings) stays where it is
        with save_on_cpu(pin_memory=hidden.is_cuda) if offload else nullcontext():
            return checkpoint(roles.bound(forward), hidden, use_reentrant=False, preserve_rng_state=False, **others)

    return run
