"""What one step of the learner did: its numbers, and how they are collected over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spiral_fast import ranks
from spiral_fast.learner.packed import Packed
from spiral_fast.learner.policy import TokenLoss
from spiral_kernels import LinearPolicyLoss


@dataclass
class StepStats:
    """What one step did. Log-prob statistics are over the sampled tokens of the live rows, before the update."""

    policy_version: int  # after the step
    skipped_reason: str | None = None  # why the optimiser was not called; None: it was
    skipped_rows: list[int] = field(default_factory=list)  # rows blamed for a number that is not finite, ascending
    loss: float = 0.0
    learning_rate: float = 0.0
    rows: int = 0
    live_rows: int = 0
    micro_batches: int = 0
    tokens_logical: int = 0  # prompt and sampled tokens of all rows
    tokens_computed: int = 0  # tokens run forward and backward
    flops_logical: float = 0.0  # of all rows, each alone; as learner/cost.py counts
    flops_computed: float = 0.0
    tokens_trained: int = 0  # sampled tokens of the live rows
    gradient_norm: float = 0.0  # before clipping
    clipped: bool = False
    clip_factor: float = 1.0  # the gradient was multiplied by it
    search_gradient_norm: float = 0.0
    aggregation_gradient_norm: float = 0.0
    gradient_cosine: float | None = None  # between the two terms; None where one is zero
    logp_gap_mean: float = 0.0  # mean |learner - engine log-prob|
    logp_gap_max: float = 0.0
    kl: float = 0.0  # KL(engine policy || learner policy), mean of r - 1 - log r over tokens sampled from the engine
    ratio_max: float = 1.0  # largest exp(learner - engine log-prob)
    entropy: dict[int, float] = field(default_factory=dict)  # level -> mean entropy of the next-token law, nats


class StepRecord:
    """Collects a rank's per-token numbers of a step, cut off from the graph, and reduces them once."""

    def __init__(self):
        self.tokens_computed = 0
        self.flops = 0.0
        self.loss: list[torch.Tensor] = []  # scalars, one per micro-batch; below (R,) each
        self.losses: list[torch.Tensor] = []
        self.log_ratios: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []
        self.levels: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []  # index of the row a token belongs to

    def add(self, packed: Packed, out: LinearPolicyLoss, loss: TokenLoss, levels, rows, flops: float) -> None:
        """One micro-batch; levels and rows (R,), of each sampled token."""
        log_ratio = out.logp - loss.rollout_logp
        self.tokens_computed += packed.tokens.numel()
        self.flops += flops
        self.loss.append(out.loss)
        self.losses.append(log_ratio.exp() * loss.credit * loss.weight)
        self.log_ratios.append(log_ratio)
        self.entropies.append(out.entropy)
        self.levels.append(levels)
        self.rows.append(rows)

    def into(self, stats: StepStats) -> None:
        """Of all ranks together: the same numbers on each."""
        of_ranks = [sums for sums in ranks.gather(self._sums()) if sums is not None]
        stats.loss = sum(sums["loss"] for sums in of_ranks)
        for name in ("micro_batches", "tokens_computed", "flops_computed", "tokens_trained"):
            setattr(stats, name, sum(sums[name] for sums in of_ranks))
        stats.logp_gap_mean = sum(sums["gap"] for sums in of_ranks) / stats.tokens_trained
        stats.kl = sum(sums["kl"] for sums in of_ranks) / stats.tokens_trained
        stats.logp_gap_max = float(np.max([sums["gap_max"] for sums in of_ranks]))  # NaN where one is
        stats.ratio_max = float(np.max([sums["ratio_max"] for sums in of_ranks]))
        entropies = [sums["entropy"] for sums in of_ranks]
        for level in sorted({level for entropy in entropies for level in entropy}):
            of_level = [entropy[level] for entropy in entropies if level in entropy]
            stats.entropy[level] = sum(total for total, _ in of_level) / sum(n for _, n in of_level)

    def not_finite(self) -> list[int]:
        """Rows with a log-prob or a token's loss that is not finite, of all ranks, ascending."""
        found: list[int] = []
        if self.rows:
            log_ratio, losses, rows = (torch.cat(x) for x in (self.log_ratios, self.losses, self.rows))
            found = rows[~(log_ratio.isfinite() & losses.isfinite())].unique().tolist()
        return sorted(row for of_rank in ranks.gather(found) for row in of_rank)

    def _sums(self) -> dict[str, Any] | None:
        """Sums and maxima over this rank's tokens; None without any."""
        if not self.rows:
            return None
        log_ratio, entropy, levels = (torch.cat(x) for x in (self.log_ratios, self.entropies, self.levels))
        gap = log_ratio.double()
        return {
            "loss": torch.stack(self.loss).double().sum().item(),
            "micro_batches": len(self.loss),
            "tokens_computed": self.tokens_computed,
            "flops_computed": self.flops,
            "tokens_trained": gap.numel(),
            "gap": gap.abs().sum().item(),
            "gap_max": gap.abs().max().item(),
            "kl": (gap.exp() - 1 - gap).sum().item(),
            "ratio_max": gap.max().exp().item(),
            "entropy": {  # level -> sum, tokens
                int(level): (entropy[levels == level].double().sum().item(), int((levels == level).sum()))
                for level in levels.unique()
            },
        }


def norm(vector: torch.Tensor) -> float:
    return torch.linalg.vector_norm(vector, dtype=torch.float64).item()
