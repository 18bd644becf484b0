"""What the engine needs of a transformers model, and which models it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spiral_fast.attention import ATTENTION

_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")  # frequencies change with the longest position of a forward
_HEAD_CHANGES = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class Served:
    """The parts of a (peft-wrapped) causal language model that the engine calls: the learner's own modules."""

    model: nn.Module
    decoder: nn.Module  # tokens to hidden states (1, T, H), final norm included
    head: nn.Module  # hidden states to logits
    layers: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype  # of keys and values
    device: torch.device


class WeightsWatch:
    """Notices that a weight was changed in place, or another adapter made active, since this object was made.

    Blind under FSDP, whose parameters are other objects whenever they are gathered.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._parameters = [] if sharded else list(model.parameters())
        self._first = self._state()

    def changed(self) -> bool:
        return self._state() != self._first

    def _state(self) -> tuple[str, list[int]]:
        adapter = getattr(self._model, "active_adapter", None)
        return str(adapter), [parameter._version for parameter in self._parameters]


def serve(model: nn.Module) -> Served:
    """Check that the engine computes exactly what the model's own forward does. Raises ValueError naming the field."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    name = type(base).__name__
    layer_types = getattr(config, "layer_types", None)
    for layer, kind in enumerate(layer_types or ()):
        if kind != "full_attention":
            raise ValueError(f"{name}: layer {layer} is {kind!r}; the radix engine serves full causal attention only")
    window = getattr(config, "sliding_window", None)
    if layer_types is None and window and getattr(config, "use_sliding_window", True):
        raise ValueError(f"{name}: sliding_window = {window}; the radix engine serves full causal attention only")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)):
        if kind in _POSITION_DEPENDENT_ROPE:
            raise ValueError(
                f"{name}: rope_type = {kind!r}: they depend on the longest position, so cached keys would be wrong"
            )
    for field in _HEAD_CHANGES:
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{name}: {field} = {getattr(config, field)}: only plain scores and a plain head are served"
            )
    for path, module in base.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(f"{name}: dropout {module.p} in {path!r} must be 0, or engine and learner differ")
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f"{name}: attention implementation is {config._attn_implementation!r}; "
            f"call set_attn_implementation({ATTENTION!r}) on the model first"
        )
    heads = config.num_attention_heads
    embedding = base.get_input_embeddings().weight
    return Served(
        model=model,
        decoder=base.model,
        head=base.get_output_embeddings(),
        layers=config.num_hidden_layers,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=embedding.shape[0],
        dtype=embedding.dtype,
        device=embedding.device,
    )
