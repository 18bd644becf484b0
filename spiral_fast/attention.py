"""The one attention implementation the models run with; who calls the model passes an object that knows how to attend.

The learner passes packed documents, the radix engine paged keys and values; the transformers modules, their weights
and their LoRA are the same objects in both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import AttentionInterface

from spiral_kernels.tree_logprobs.attention import NOT_CAUSAL_SOFTMAX

ATTENTION = "spiral_fast"  # name under which transformers finds it: model.set_attn_implementation(ATTENTION)


class Attend(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query (1, Hq, T, D), key and value (1, Hkv, T, D) of the T tokens of this forward, rotary positions applied.

        Returns (1, T, Hq, D). Only of a layer with a sliding window there is one more keyword, `window`: how many
        tokens a token sees, itself included.
        """


def _attention(
    module, query, key, value, attention_mask, scaling=None, attend: Attend | None = None, sliding_window=None, **asked
):
    if attend is None:
        raise ValueError(
            f"the attention implementation {ATTENTION!r} needs the keyword `attend` in the model's forward"
        )
    for name in NOT_CAUSAL_SOFTMAX:
        if asked.get(name) is not None:
            raise ValueError(f"a layer asks for {name}; only plain causal attention is supported")
    window = {} if sliding_window is None else {"window": sliding_window}
    return attend.attend(module.layer_idx, query, key, value, scaling, **window), None


AttentionInterface.register(ATTENTION, _attention)
