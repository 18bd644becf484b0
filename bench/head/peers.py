"""The head in the ways trainers do it, frozen: log-probs, and a clipped policy loss, each in its best configuration.

A peer that is not installed is left out with the reason; `pip install 'spiral-fast[peers]'` and trl bring them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from spiral_kernels import available_backends, force_backend, linear_logprob, linear_policy_loss, policy_loss

SEQUENCE = 128  # tokens; one advantage each
CHUNK_ROWS = 256
LIGER_SEQUENCES = 4  # a chunk: 512 rows were fastest of 128, 512, 2048
CLIP = 0.2


class Inputs(NamedTuple):
    hidden: Tensor  # (T, H), requires a gradient
    weight: Tensor  # (V, H), frozen
    targets: Tensor  # (T,)
    advantages: Tensor  # (T,) float32, the same in all of a sequence
    rollout_logp: Tensor  # (T,) float32; ratios on both sides of the clip


LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets -> logp (T,)
Loss = Callable[[Inputs], Tensor]  # the mean over tokens


class Method(NamedTuple):
    function: Callable
    gemms: int  # of T x H x V, in forward and backward


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in float32, then log_softmax."""
    return log_softmax((hidden @ weight.t()).float(), 1).gather(1, targets[:, None])[:, 0]


def in_chunks(of_chunk: LogProb) -> LogProb:
    """Chunks of rows, each recomputed in the backward by torch's checkpoint."""

    def logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        parts = zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True)
        return torch.cat([checkpoint(of_chunk, h, weight, t, use_reentrant=False) for h, t in parts])

    return logp


def trl_selective(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in the input dtype, then TRL's selective_log_softmax, which takes bfloat16 one sequence at a time."""
    from trl.trainer.utils import selective_log_softmax

    logits = (hidden @ weight.t()).view(-1, SEQUENCE, weight.shape[0])
    return selective_log_softmax(logits, targets.view(-1, SEQUENCE)).flatten()


def cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, impl="torch_compile", reduction="none")


def ours(backend: str) -> LogProb:
    def logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        force_backend(backend, "linear_logprob")
        try:
            return linear_logprob(hidden, weight, targets).logp
        finally:
            force_backend(None, "linear_logprob")

    return logp


def log_probs(device: str = "cpu") -> dict[str, Method]:
    found = {f"linear_logprob, {b}": Method(ours(b), 2) for b in _able("linear_logprob", device)}
    found |= {
        "full log_softmax": Method(full, 2),
        "chunks + checkpoint": Method(in_chunks(full), 3),
        "chunks + checkpoint, torch.compile": Method(in_chunks(torch.compile(full)), 3),
    }
    if _installed("trl"):
        found["TRL selective_log_softmax"] = Method(trl_selective, 2)
    if _installed("cut_cross_entropy"):
        found["cut-cross-entropy, torch_compile"] = Method(cut_cross_entropy, 2)
    return found


def losses(device: str = "cpu") -> dict[str, Method]:
    found = {f"linear_policy_loss, {b}": Method(our_loss(b), 2) for b in _able("linear_policy_loss", device)}
    fastest = next(iter(found))
    found[f"{fastest}, entropy bonus"] = Method(our_loss(fastest.split(", ")[1], entropy_coef=0.01), 2)
    if _installed("liger_kernel"):
        found["Liger LigerFusedLinearGRPOLoss"] = Method(liger, 3)
    return found | {f"{name} + policy_loss": Method(of_logp(m.function), m.gemms) for name, m in log_probs().items()}


def our_loss(backend: str, entropy_coef: float = 0.0) -> Loss:
    def loss(inputs: Inputs) -> Tensor:
        hidden, weight, targets, advantages, rollout_logp = inputs
        each = torch.full_like(rollout_logp, 1 / len(targets))
        force_backend(backend, "linear_policy_loss")
        try:
            settings = {"loss": "ppo_clip", "clip": (CLIP, CLIP), "entropy_coef": entropy_coef}
            return linear_policy_loss(hidden, weight, targets, advantages, rollout_logp, each, **settings).loss
        finally:
            force_backend(None, "linear_policy_loss")

    return loss


def of_logp(logp: LogProb) -> Loss:
    def loss(inputs: Inputs) -> Tensor:
        hidden, weight, targets, advantages, rollout_logp = inputs
        found, tokens = logp(hidden, weight, targets).float(), torch.arange(len(targets) + 1)
        each = torch.full_like(found, 1 / len(targets))
        settings = {"loss": "ppo_clip", "clip": (CLIP, CLIP), "token_weight": each}
        return policy_loss(found, rollout_logp, advantages, tokens, **settings).loss

    return loss


def liger(inputs: Inputs) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight, targets, advantages, rollout_logp = inputs
    of_loss = {"beta": 0.0, "epsilon_low": CLIP, "epsilon_high": CLIP, "loss_type": "bnpo", "temperature": 1.0}
    of_cut = {"compiled": False, "use_ref_model": False, "chunk_size": LIGER_SEQUENCES}
    sequences = hidden.view(-1, SEQUENCE, hidden.shape[1])
    of_tokens = (x.view(-1, SEQUENCE) for x in (targets, torch.ones_like(rollout_logp)))
    old = rollout_logp.view(-1, SEQUENCE)
    fused = LigerFusedLinearGRPOLoss(**of_loss, **of_cut)
    return fused(sequences, weight, *of_tokens, advantages[::SEQUENCE], old_per_token_logps=old)[0]


def left_out() -> dict[str, str]:
    """Peers that are not there, and why."""
    packages = {"trl": "trl", "cut_cross_entropy": "cut-cross-entropy", "liger_kernel": "liger-kernel"}
    return {name: f"{package} is not installed" for name, package in packages.items() if not _installed(name)}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _able(operation: str, device: str) -> list[str]:
    return [b for b, reason in available_backends(operation, device).items() if reason is None and b != "reference"]
