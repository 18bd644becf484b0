"""The head in the ways trainers do it, each a function (hidden (T, H), weight (V, H), targets (T,)) -> logp (T,)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from spiral_kernels import available_backends, force_backend, linear_logprob

LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNK_ROWS = 256
SEQUENCE = 512  # tokens of a batch entry for the selective log-softmax


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in float32, then log_softmax."""
    return log_softmax((hidden @ weight.t()).float(), 1).gather(1, targets[:, None])[:, 0]


def chunked_checkpoint(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`full` on chunks of rows, each recomputed in the backward by torch's checkpoint."""
    parts = zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True)
    return torch.cat([checkpoint(full, h, weight, t, use_reentrant=False) for h, t in parts])


def selective(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in the input dtype, then TRL's selective_log_softmax: one sequence at a time."""
    logits = (hidden @ weight.t()).split(SEQUENCE)
    picks = targets.split(SEQUENCE)
    if hidden.dtype == torch.float32:
        parts = [x.gather(1, t[:, None])[:, 0] - x.logsumexp(1) for x, t in zip(logits, picks, strict=True)]
    else:
        parts = [log_softmax(x, 1).gather(1, t[:, None])[:, 0] for x, t in zip(logits, picks, strict=True)]
    return torch.cat(parts)


def ours(backend: str) -> LogProb:
    def logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        force_backend(backend, "linear_logprob")
        try:
            return linear_logprob(hidden, weight, targets).logp
        finally:
            force_backend(None, "linear_logprob")

    return logp


def peers(device: str = "cpu") -> dict[str, tuple[LogProb, int]]:
    """By name: the function, and its GEMMs of T x H x V in forward and backward with a frozen head."""
    able = available_backends("linear_logprob", device)
    found = {f"linear_logprob, {b}": (ours(b), 3) for b in able if able[b] is None and b != "reference"}
    return found | {
        "full log_softmax": (full, 2),
        "chunks + checkpoint": (chunked_checkpoint, 3),
        "selective_log_softmax (TRL)": (selective, 2),
    }
