"""The learner: importance-sampling policy gradient of one LoRA adapter, or two, over a batch of credited traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from spiral_fast import ranks
from spiral_fast.config import Config
from spiral_fast.interrupts import interrupts_held
from spiral_fast.learner import checkpoint, fsdp
from spiral_fast.learner.cost import cost_of
from spiral_fast.learner.micro_batches import MicroBatches
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.packed import Packed
from spiral_fast.learner.policy import Policy, TokenLoss
from spiral_fast.learner.refusals import refuse_windows
from spiral_fast.learner.rows import Row, check_rows, not_finite
from spiral_fast.learner.self_check import check_against_flat
from spiral_fast.learner.step_stats import StepRecord, StepStats, norm
from spiral_fast.trace import SEARCH
from spiral_kernels import LinearPolicyLoss

__all__ = ["Learner", "Row", "StepStats"]


class Learner:
    """AdamW on the adapter of `loaded.model`, or on both; nothing else is trained.

    loss = sum over rows and their tokens t of weight * (-exp(lp_t - rollout_logp_t) * credit), lp_t at the sampling
    temperature (paper, Algorithm 1, with token-level importance weights). Weights are of the whole batch, so the step
    does not depend on how it is cut into micro-batches, nor on which rows share the computation of a common prefix.
    With two adapters each row's lp_t is under the one of its level (learner/roles.py), which alone it trains; a step
    without live rows for one leaves that one and its moments as they are. clip_norm bounds the norm over both.

    On several ranks (spiral_fast/ranks.py) every method but `save` is called on all of them with the same rows; each
    computes its micro-batches, and all return the same and hold the same adapter.
    """

    def __init__(self, config: Config, loaded: LoadedModel):
        """Raises ConfigError where the model's attention does not allow learner.sharing."""
        refuse_windows(config, loaded.causal_lm.config)
        self.config = config.learner
        self.temperature = config.rollout.temperature
        self.max_context = loaded.max_context
        self.policy_version = 0
        self.optimiser_steps = 0  # of `step`; the warm-up counts them
        self.policy = loaded.policy or Policy(loaded.model)
        self.policy.batch_invariant = config.rollout.batch_invariant
        self.device = loaded.device
        self.cost = cost_of(loaded.model)
        self._check_due = self.config.self_check and self.config.sharing != "none"
        if self.config.checkpointing:
            self.policy.checkpoint_layers(offload=self.config.offload_checkpoints)
        if self.config.fsdp and loaded.policy is None:
            fsdp.shard(self.policy, self.device, offload_base=self.config.offload_base)
        self.parameters = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
        for parameter in self.parameters.values():
            ranks.as_first(parameter.data)
        self.optimiser = self._adamw()
        self._supervised_optimiser: torch.optim.AdamW | None = None

    def step(self, rows: Sequence[Row]) -> StepStats:
        """One update from the live rows: `accumulate`, then `update`."""
        return self.update(self.accumulate(rows))

    def accumulate(self, rows: Sequence[Row]) -> StepStats:
        """The clipped gradient of the live rows' loss. If none is live or a number is not finite, the stats say why the
        update will be skipped, and the gradient is gone."""
        stats = StepStats(policy_version=self.policy_version, rows=len(rows), learning_rate=self._learning_rate())
        stats.tokens_logical = sum(len(row.prompt) + len(row.tokens) for row in rows)
        stats.flops_logical = sum(self.cost.of_row(row) for row in rows)
        live = [index for index, row in enumerate(rows) if row.credit * row.weight != 0.0]
        check_rows(rows, live, self.max_context, ratio=True)
        self.optimiser.zero_grad()
        if bad := not_finite(rows):  # of dead rows too: such an engine is not to be trusted
            return _skip(stats, "a rollout log-prob is not finite", bad)
        if not live:
            return _skip(stats, "no live row", [])
        search = [index for index in live if rows[index].level == SEARCH]
        aggregation = [index for index in live if rows[index].level != SEARCH]
        record, load = StepRecord(), [0.0] * ranks.size()
        self._backward(rows, search, record, load)
        search_gradient = ranks.sum_over(self.gradient()) if search and aggregation else None
        self._backward(rows, aggregation, record, load)
        gradient = self._sum_gradients()
        record.into(stats)
        stats.live_rows = len(live)
        stats.gradient_norm = norm(gradient)
        _gradient_terms(search_gradient, gradient, stats, all_search=bool(search), apart=self.policy.roles.apart)
        limit = self.config.clip_norm
        if limit is not None and math.isfinite(stats.gradient_norm) and stats.gradient_norm > limit:
            stats.clipped, stats.clip_factor = True, limit / stats.gradient_norm
        if reason := _not_finite(stats, gradient.dtype):
            self.optimiser.zero_grad()
            return _skip(stats, reason, record.not_finite() or live)
        if stats.clipped:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(stats.clip_factor)
        return stats

    def update(self, stats: StepStats) -> StepStats:
        """AdamW on the accumulated gradient, unless `stats` says to skip it. Takes milliseconds: who must not be
        interrupted between an update and its record can hold signals around this call."""
        if stats.skipped_reason is None:
            self._update(self.optimiser, stats.learning_rate)
            self.optimiser_steps += 1
            stats.policy_version = self.policy_version
        return stats

    @torch.no_grad()
    def log_probs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """(len(tokens),) log-probs of each row's sampled tokens at the sampling temperature, dead rows included."""
        check_rows(rows, range(len(rows)), self.max_context, ratio=False)
        out: list[np.ndarray] = [np.empty(0)] * len(rows)
        for part, packed in self._micro_batches(rows):
            logp = self.policy(packed, self.temperature).logp
            for index, values in zip(part, logp.split(packed.counts), strict=bool(part)):
                out[index] = values.cpu().numpy()
        of_ranks = ranks.gather(out)
        return [max((of_rank[i] for of_rank in of_ranks), key=len) for i in range(len(rows))]

    def supervised_step(self, rows: Sequence[Row], learning_rate: float) -> float:
        """One AdamW step (with moments of its own) on the cross-entropy at temperature 1, the mean over the batch's
        sampled tokens. Returns that mean before the update, in nats. Credits and weights are not read."""
        check_rows(rows, range(len(rows)), self.max_context, ratio=False)
        if self._supervised_optimiser is None:
            self._supervised_optimiser = self._adamw()
        self._supervised_optimiser.zero_grad()
        n_tokens = sum(len(row.tokens) for row in rows)
        total = 0.0
        for part, packed in self._micro_batches(rows):
            loss = -self.policy(packed, 1.0).logp.sum() / n_tokens * bool(part)
            loss.backward()
            total += loss.item()
        total = ranks.total(total)
        for name, value in (("cross-entropy", total), ("gradient norm", norm(self._sum_gradients()))):
            if not math.isfinite(value):
                self._supervised_optimiser.zero_grad()
                raise FloatingPointError(f"supervised step: the {name} is {value}; lower warm_start.learning_rate")
        self._update(self._supervised_optimiser, learning_rate)
        return total

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Within it the engine may run the model: whole plain weights also under FSDP; a no-op without."""
        return fsdp.unsharded(self.policy)

    def save(self, folder: str | Path) -> None:
        """PEFT adapter, optimiser moments and counters into `folder`."""
        checkpoint.save(self, Path(folder))

    def restore(self, folder: str | Path) -> None:
        """Continue from what `save` wrote: the same steps give the same bits as without the break."""
        checkpoint.restore(self, Path(folder))

    def _backward(self, rows: Sequence[Row], indices: list[int], record: StepRecord, load: list[float]) -> None:
        """Add the gradient of the loss of rows[indices] to the adapter's: of this rank's micro-batches of them."""
        if not indices:
            return
        micro_batches = self._micro_batches([rows[i] for i in indices], load)
        for part, packed in micro_batches:
            part = [indices[i] for i in part]
            batch = [rows[i] for i in part]
            out, token_loss = self.loss_and_gradient(batch, packed)
            if self._check_due:  # the first of all: the gradient is this micro-batch's alone
                self._check_due = False
                check_against_flat(self, batch, out.logp, forwards=micro_batches.most_rows_first)
            if part:
                levels = _per_token([row.level for row in batch], packed, packed.targets)
                row_of = _per_token(part, packed, packed.targets)
                record.add(packed, out, token_loss, levels, row_of, self.cost.of_packed(packed))

    def loss_and_gradient(self, batch: Sequence[Row], packed: Packed) -> tuple[LinearPolicyLoss, TokenLoss]:
        """Adds the gradient of one micro-batch, packed from `batch`; its loss and log-probs, cut off from the graph.
        Without a row the gradient is 0, whatever is packed."""
        if batch:
            rollout_logp = torch.from_numpy(np.concatenate([row.rollout_logp for row in batch])).to(self.device)
            credit, weight = (
                _per_token([getattr(row, name) for row in batch], packed, rollout_logp.double())
                for name in ("credit", "weight")
            )
        else:
            rollout_logp = torch.zeros(len(packed.targets), device=self.device)
            credit = weight = rollout_logp.double()
        token_loss = TokenLoss(credit, rollout_logp, weight)
        out = self.policy(packed, self.temperature, token_loss)
        out.loss.backward()
        return out._replace(loss=out.loss.detach()), token_loss

    def _micro_batches(self, rows: Sequence[Row], load: list[float] | None = None) -> MicroBatches:
        return MicroBatches(rows, self.config, self.cost, self.policy.roles, self.device, load)

    def gradient(self) -> torch.Tensor:
        """The adapter's gradient as one flat vector (a copy), of this rank's micro-batches; a parameter without one
        counts as zero."""
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values())
        return torch.cat([gradient.detach().flatten() for gradient in gradients])

    def _sum_gradients(self) -> torch.Tensor:
        """Make the gradient on each rank that of all ranks' micro-batches. Weights are of the whole batch: their sum is
        the batch's. Returns it as one flat vector."""
        whole = ranks.sum_over(self.gradient())
        if ranks.size() > 1:
            parameters = list(self.parameters.values())
            for parameter, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
                if parameter.grad is not None:  # an adapter without rows has none, on no rank
                    parameter.grad.copy_(part.view_as(parameter))
        return whole

    def _learning_rate(self) -> float:
        """Linear warm-up over `warmup_steps` optimiser steps, then constant."""
        warmup = self.config.warmup_steps
        return self.config.learning_rate * min(1.0, (self.optimiser_steps + 1) / warmup if warmup else 1.0)

    def _adamw(self) -> torch.optim.AdamW:
        settings = self.config
        return torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=False,  # the fused one does not bump the version counters by which an engine sees new weights
        )

    def _update(self, optimiser: torch.optim.AdamW, learning_rate: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        with interrupts_held():  # a part of the adapter updated is no policy of any version
            optimiser.step()
            optimiser.zero_grad()
            self.policy_version += 1


def _per_token(values: Sequence[float], packed: Packed, like: torch.Tensor) -> torch.Tensor:
    """One value per row -> (R,) one per sampled token, in the dtype and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(torch.tensor(packed.counts)).to(like.device)


def _skip(stats: StepStats, reason: str, rows: list[int]) -> StepStats:
    stats.skipped_reason, stats.skipped_rows = reason, rows
    return stats


def _not_finite(stats: StepStats, dtype: torch.dtype) -> str | None:
    """Which number of the step, if any, must not reach the optimiser; dtype: of its moments."""
    if not math.isfinite(stats.logp_gap_max):  # a log-prob of -inf alone leaves the loss finite: its ratio is 0
        return "a learner log-prob is not finite"
    if not math.isfinite(stats.loss):
        return f"loss is {stats.loss}"
    if not math.isfinite(stats.gradient_norm):
        return f"gradient norm is {stats.gradient_norm}"
    if stats.gradient_norm * stats.clip_factor > math.sqrt(torch.finfo(dtype).max):
        return f"gradient norm is {stats.gradient_norm:.3g}, whose square AdamW cannot hold"
    return None


def _gradient_terms(
    search: torch.Tensor | None, total: torch.Tensor, stats: StepStats, *, all_search: bool, apart: bool
) -> None:
    """Norms and cosine of the search and the aggregation term; `search` is None where one term is absent. Terms of
    adapters `apart` share no parameter: their cosine would be 0 whatever they do, so there is none."""
    if search is None:
        if all_search:
            stats.search_gradient_norm = stats.gradient_norm
        else:
            stats.aggregation_gradient_norm = stats.gradient_norm
        return
    aggregation = total - search
    stats.search_gradient_norm = norm(search)
    stats.aggregation_gradient_norm = norm(aggregation)
    product = stats.search_gradient_norm * stats.aggregation_gradient_norm
    if product > 0 and not apart:
        stats.gradient_cosine = torch.dot(search, aggregation).item() / product
