"""What the planner needs to know of a model, counted on the model itself (empty, device `meta`)."""

from __future__ import annotations

from dataclasses import dataclass

from peft import PeftModel
from torch import nn

from spiral_fast.config import ConfigError
from spiral_fast.learner.cost import Cost, cost_of
from spiral_fast.supported import key_value_shape, windowed_layer

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int  # H
    mlp: int  # I, width of the gated MLP
    query: int  # Hq * D
    key: int  # Hkv * D
    query_heads: int
    key_heads: int
    vocabulary: int
    element: int  # bytes of a number of the frozen base and of an activation
    query_key_norm: bool
    rank: int
    adapted: frozenset[str]  # the parts of a decoder layer that the adapter is on: ATTENTION_PARTS, MLP_PARTS
    base_numbers: int  # of the frozen base; a tied head once
    layer_numbers: int  # of them in one decoder layer
    adapter_numbers: int  # float32; of both where there are two
    matrix_numbers: int  # in products that every token passes: linear layers of the decoder, with one adapter
    max_context: int
    cost: Cost  # what learner/cost.py counts

    @property
    def base_bytes(self) -> int:
        return self.base_numbers * self.element

    @property
    def adapter_bytes(self) -> int:
        return 4 * self.adapter_numbers

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.key * self.element


def shape_of(model: PeftModel) -> Shape:
    """Raises ConfigError for decoder layers of other parts than the memory formulas know."""
    causal_lm = model.get_base_model()
    config, layers = causal_lm.config, causal_lm.get_decoder().layers
    if where := windowed_layer(config):
        raise ConfigError(f"model.path: {where}; `plan` knows full attention alone")
    layer = layers[0]
    for owner, parts in (("self_attn", ATTENTION_PARTS), ("mlp", MLP_PARTS)):
        missing = [part for part in parts if not hasattr(getattr(layer, owner, None), part)]
        if missing:
            raise ConfigError(
                f"model.path: {type(layer).__name__} has no {owner}.{missing[0]}; `plan` knows decoder layers of the "
                f"parts {', '.join(ATTENTION_PARTS + MLP_PARTS)} (Llama, Qwen2, Qwen3, SmolLM2)"
            )
    key_heads, size = key_value_shape(config)
    frozen = {True: 0, False: 0}
    for parameter in causal_lm.parameters():
        frozen[not parameter.requires_grad] += parameter.numel()
    weight = causal_lm.get_output_embeddings().weight
    return Shape(
        layers=len(layers),
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        query=config.num_attention_heads * size,
        key=key_heads * size,
        query_heads=config.num_attention_heads,
        key_heads=key_heads,
        vocabulary=weight.shape[0],
        element=weight.element_size(),
        query_key_norm=hasattr(layer.self_attn, "q_norm"),
        rank=next(iter(model.peft_config.values())).r,
        adapted=frozenset(
            path.rpartition(".")[2] for path, module in layer.named_modules() if hasattr(module, "lora_A")
        ),
        base_numbers=frozen[True],
        layer_numbers=sum(p.numel() for p in layer.parameters() if not p.requires_grad),
        adapter_numbers=frozen[False],
        matrix_numbers=sum(
            m.weight.numel() // (len(model.peft_config) if m.weight.requires_grad else 1)
            for m in layers.modules()
            if isinstance(m, nn.Linear)
        ),
        max_context=config.max_position_embeddings,
        cost=cost_of(model),
    )
