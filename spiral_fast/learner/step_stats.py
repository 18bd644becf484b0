"""What one step of the learner did: its numbers, and how they are collected over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

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
    """Collects a step's per-token numbers, cut off from the graph, and reduces them once."""

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
        log_ratio, entropy, levels = (torch.cat(x) for x in (self.log_ratios, self.entropies, self.levels))
        stats.loss = torch.stack(self.loss).double().sum().item()
        stats.micro_batches = len(self.loss)
        stats.tokens_computed, stats.flops_computed = self.tokens_computed, self.flops
        stats.tokens_trained = log_ratio.numel()
        gap = log_ratio.double()
        stats.logp_gap_mean = gap.abs().mean().item()
        stats.logp_gap_max = gap.abs().max().item()
        stats.kl = (gap.exp() - 1 - gap).mean().item()
        stats.ratio_max = gap.max().exp().item()
        stats.entropy = {int(level): entropy[levels == level].double().mean().item() for level in levels.unique()}

    def not_finite(self) -> list[int]:
        """Rows with a log-prob or a token's loss that is not finite, ascending."""
        log_ratio, losses, rows = (torch.cat(x) for x in (self.log_ratios, self.losses, self.rows))
        return rows[~(log_ratio.isfinite() & losses.isfinite())].unique().tolist()


def norm(vector: torch.Tensor) -> float:
    return torch.linalg.vector_norm(vector, dtype=torch.float64).item()
