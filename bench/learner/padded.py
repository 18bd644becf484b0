"""The learner's step as TRL's GRPOTrainer computes it: padded rectangles, peft's own layers, all completion logits.

Prompts are padded on the left, completions on the right, to the longest of the micro-batch; logits of the completion
columns come from `logits_to_keep`; log-probs from a per-row log_softmax (bfloat16) or logsumexp (float32), entropies
from the logits, loss and ratio as in the learner. Where `sort` is on, micro-batches are those of the learner; TRL does
not sort: there, batch order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from peft import PeftModel

from spiral_fast.learner.cost import cost_of
from spiral_fast.learner.rows import Row, micro_batches


class PaddedLearner:
    def __init__(self, model: PeftModel, pad_token_id: int, token_budget: int, *, sort: bool):
        """model: a peft model whose LoRA layers run peft's own forward, on sdpa attention."""
        self.model = model
        self.pad = pad_token_id
        self.budget = token_budget
        self.sort = sort
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-12)

    def step(self, rows: Sequence[Row]) -> float:
        """One update; the gradient's norm."""
        self.accumulate(rows)
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()  # in float32 off by 1e-3 at this size
        self.optimiser.step()
        return norm

    def accumulate(self, rows: Sequence[Row]) -> None:
        """The gradient of the rows' loss."""
        self.optimiser.zero_grad()
        for part in self._parts(rows):
            self._loss([rows[i] for i in part]).backward()

    def computed(self, rows: Sequence[Row]) -> tuple[int, float]:
        """Tokens, padding among them, and FLOPs of a step: all of the rectangle attends and goes through the head."""
        cost, tokens, flop = cost_of(self.model), 0, 0.0
        for part in self._parts(rows):
            n_prompt = max(len(rows[i].prompt) for i in part)
            n_sampled = max(len(rows[i].tokens) for i in part)
            n = n_prompt + n_sampled
            tokens += len(part) * n
            flop += len(part) * cost.flops(n, n * n, n_sampled + 1)
        return tokens, flop

    def _parts(self, rows: Sequence[Row]) -> list[list[int]]:
        if self.sort:
            return micro_batches(rows, self.budget)
        longest = max(row.computed_tokens + 1 for row in rows)
        size = max(1, self.budget // longest)
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]

    def _loss(self, rows: list[Row]) -> torch.Tensor:
        n_prompt, n_sampled = max(len(r.prompt) for r in rows), max(len(r.tokens) for r in rows)
        ids = torch.full((len(rows), n_prompt + n_sampled), self.pad)
        mask = torch.zeros_like(ids)
        rollout_logp = torch.zeros(len(rows), n_sampled)
        for i, row in enumerate(rows):
            start, end = n_prompt - len(row.prompt), n_prompt + len(row.tokens)
            ids[i, start:end] = torch.tensor(row.prompt + row.tokens)
            mask[i, start:end] = 1
            rollout_logp[i, : len(row.tokens)] = torch.from_numpy(np.asarray(row.rollout_logp))
        logits = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=n_sampled + 1, use_cache=False).logits[
            :, :-1
        ]
        targets, sampled = ids[:, n_prompt:, None], mask[:, n_prompt:]
        if logits.dtype == torch.float32:
            logsumexp = torch.stack([row.logsumexp(-1) for row in logits])
            logp = logits.gather(2, targets)[:, :, 0] - logsumexp
        else:
            logp = torch.stack([row.log_softmax(-1).gather(1, t)[:, 0] for row, t in zip(logits, targets, strict=True)])
        with torch.no_grad():
            for row in logits:
                law = row.log_softmax(-1)
                -(law.exp() * law).sum(-1)
        factors = torch.tensor([row.weight * row.credit for row in rows])[:, None]
        return -((logp - rollout_logp).exp() * factors * sampled).sum()
