"""FLOPs of a forward and backward, to balance micro-batches and to say what sharing saves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn

from spiral_fast.learner.packed import Packed
from spiral_fast.learner.rows import Row
from spiral_fast.supported import windows


@dataclass(frozen=True)
class Cost:
    """A multiplication and an addition are two FLOPs. Only matrix products count: of a frozen layer the forward and the
    gradient of its input, of attention also both gradients; what checkpointing computes again does not count."""

    per_token: float  # decoder layers
    per_pair: float  # attention, per (query, key) pair of all layers and heads
    per_row: float  # head, per sampled token
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)  # (tokens a token sees, None: all; share of layers)

    def flops(self, tokens: int, pairs: int, rows: int) -> float:
        return self.per_token * tokens + self.per_pair * pairs + self.per_row * rows

    def of_row(self, row: Row) -> float:
        """Of a row alone."""
        n = row.computed_tokens
        return self.flops(n, self._pairs(torch.arange(n)), len(row.tokens))

    def of_packed(self, packed: Packed) -> float:
        return self.flops(packed.tokens.numel(), self._pairs(packed.positions), packed.targets.numel())

    def _pairs(self, positions: torch.Tensor) -> float:
        """A token attends to itself and to those before it on its path. Mean of the layers."""
        seen = positions + 1
        return sum(
            share * int((seen if window is None else seen.clamp(max=window)).sum()) for window, share in self.windows
        )


def cost_of(model: PeftModel) -> Cost:
    causal_lm = model.get_base_model()
    config = causal_lm.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = causal_lm.get_decoder().layers
    numbers = {True: 0, False: 0}  # of the layers' matrices, trained or frozen
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            numbers[module.weight.requires_grad] += module.in_features * module.out_features
    return Cost(
        per_token=6.0 * (numbers[True] // len(model.peft_config)) + 4.0 * numbers[False],  # a token passes one adapter
        per_pair=12.0 * heads * size * len(layers),
        per_row=4.0 * causal_lm.get_output_embeddings().weight.numel(),
        windows=tuple((window, n / len(layers)) for window, n in Counter(windows(config)).items()),
    )
