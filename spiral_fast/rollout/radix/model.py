"""What the engine needs of a transformers model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from spiral_fast.attention import ATTENTION
from spiral_fast.supported import UnsupportedModel, check_config, check_modules, key_value_shape, windowed_layer


@dataclass(frozen=True)
class Served:
    """The parts of a causal language model that the engine calls: the learner's own modules."""

    decoder: nn.Module  # tokens to hidden states (1, T, H), final norm included
    head: nn.Module  # hidden states to logits
    layers: int
    key_value_heads: int
    head_dim: int
    windows: bool  # some layers have a sliding window
    vocabulary: int
    dtype: torch.dtype  # of keys and values
    device: torch.device


class WeightsWatch:
    """Notices a weight changed in place, or another adapter made the trained one, since this object was made."""

    def __init__(self, model: nn.Module):
        self._parameters = list(model.parameters())
        self._first = self._state()

    def changed(self) -> bool:
        return self._state() != self._first

    def _state(self) -> list[tuple[int, bool]]:
        return [(parameter._version, parameter.requires_grad) for parameter in self._parameters]


def serve(model: PreTrainedModel) -> Served:
    """Check that the engine computes exactly what the model's own forward does. Raises ValueError naming the field."""
    name = type(model).__name__
    try:
        check_config(model.config)
        check_modules(model)
    except UnsupportedModel as error:
        raise ValueError(f"the radix engine cannot serve this model: it {error}") from None
    if model.config._attn_implementation != ATTENTION:
        raise ValueError(
            f"{name}: attention implementation is {model.config._attn_implementation!r}; "
            f"call set_attn_implementation({ATTENTION!r}) on the model first"
        )
    decoder, embedding = model.get_decoder(), model.get_input_embeddings().weight
    heads, head_dim = key_value_shape(model.config)
    return Served(
        decoder=decoder,
        head=model.get_output_embeddings(),
        layers=len(decoder.layers),
        key_value_heads=heads,
        head_dim=head_dim,
        windows=windowed_layer(model.config) is not None,
        vocabulary=embedding.shape[0],
        dtype=embedding.dtype,
        # between rollouts the base may lie in host memory (learner.offload_base), the adapter does not
        device=next((p.device for p in model.parameters() if p.requires_grad), embedding.device),
    )
