"""Which transformers models learner and engine compute exactly; every other one is refused in words.

Both call the decoder on tokens of many sequences at once, with their positions and an attention of their own
(spiral_fast/attention.py), and a plain linear head on some of its hidden states.
"""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their frequencies change with the longest position of a forward
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LOGIT_CHANGES = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)
OTHER_HEADS = ("classifier", "summary")  # dropout fields of heads that a causal language model does not have


class UnsupportedModel(ValueError):
    """The message is one line that names what the model has or lacks."""


def check_config(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for what the config already tells, before any weight is read."""

    def refuse(field: str, value, why: str) -> None:
        raise UnsupportedModel(f"has {field} = {value!r} in its config: {why}")

    for field, value in config.to_dict().items():
        if ("dropout" in field or field.endswith("pdrop")) and isinstance(value, float) and value > 0:
            if not field.startswith(OTHER_HEADS):
                refuse(field, value, "dropout must be 0, or engine and learner differ")
    for field in EXPERTS:
        value = getattr(config, field, None)
        if value and value > 1:
            refuse(field, value, "mixture-of-experts router losses depend on the whole batch; use a dense model")
    for kind in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if kind in BATCH_DEPENDENT_ROPE:
            refuse("rope_type", kind, "these rotary frequencies depend on the batch's longest position")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            refuse(f"layer_types[{layer}]", kind, "only full and sliding-window causal attention are supported")
        if kind == "sliding_attention" and not getattr(config, "sliding_window", None):
            refuse(f"layer_types[{layer}]", kind, "it has no sliding_window")
    for field in LOGIT_CHANGES:
        value = getattr(config, field, None)
        if value is not None and value != 1:
            refuse(field, value, "only plain attention and a plain linear head are supported")


def check_modules(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if the model lacks a part that learner or engine calls."""
    name = type(model).__name__
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedModel(f"is a {name}, whose {type(decoder).__name__} has no list of decoder `layers`")
    if not model.is_backend_compatible():
        raise UnsupportedModel(f"is a {name}, whose attention does not go through transformers' AttentionInterface")
    parameters = inspect.signature(decoder.forward).parameters
    if "position_ids" not in parameters:
        raise UnsupportedModel(f"is a {name}, whose {type(decoder).__name__} takes no position_ids")
    if type(head) is not nn.Linear:
        raise UnsupportedModel(f"is a {name}, whose head is a {type(head).__name__}; only a linear head is supported")
    if head.bias is not None:
        raise UnsupportedModel(f"is a {name}, whose head has a bias; only a linear head without one is supported")
    for field in ("max_position_embeddings", "num_attention_heads", "hidden_size"):
        if getattr(model.config, field, None) is None:
            raise UnsupportedModel(f"is a {name}, whose config has no {field}")
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedModel(f"has dropout {module.p} in {path!r}: it must be 0, or engine and learner differ")


def windows(config: PretrainedConfig) -> list[int | None]:
    """Of each layer: how many tokens, itself included, a token sees in it; None: all before it."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def windowed_layer(config: PretrainedConfig) -> str | None:
    """The first layer with a sliding window, in words; None where every layer has full attention."""
    for layer, window in enumerate(windows(config)):
        if window is not None:
            return f"layer {layer} attends within a sliding window of {window} tokens"
    return None


def key_value_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Key/value heads, and the size of one key and of one value, in every layer."""
    heads = config.num_attention_heads
    return (
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _rope_types(rope: dict) -> list[str]:
    nested = [kind for value in rope.values() if isinstance(value, dict) for kind in _rope_types(value)]
    return nested + ([rope["rope_type"]] if "rope_type" in rope else [])
