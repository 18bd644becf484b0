"""Models the learner cannot train exactly are refused by name, before a step is made."""

from __future__ import annotations

from peft import PeftConfig, PeftType
from transformers import PretrainedConfig

from spiral_fast.config import ConfigError

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their frequencies change with the batch's longest position
LOGIT_CHANGES = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")


def refuse_model(path: str, config: PretrainedConfig) -> None:
    """Raise ConfigError if the architecture is one whose log-probs the packed path would get wrong."""

    def refuse(field: str, value, why: str) -> None:
        raise ConfigError(f"model.path: {path!r} has {field} = {value!r} in its config: {why}")

    for field, value in config.to_dict().items():
        if ("dropout" in field or field.endswith("pdrop")) and isinstance(value, float) and value > 0:
            refuse(field, value, "dropout must be 0, or engine and learner differ")
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        value = getattr(config, field, None)
        if value and value > 1:
            refuse(field, value, "mixture-of-experts router losses depend on the whole batch; use a dense model")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in _rope_types(rope):
        if kind in BATCH_DEPENDENT_ROPE:
            refuse("rope_type", kind, "these rotary frequencies depend on the batch's longest position")
    layer_types = getattr(config, "layer_types", None)
    for kind in layer_types or ():
        if kind != "full_attention":
            refuse("layer_types", kind, "only full causal attention is supported")
    window = getattr(config, "sliding_window", None)
    if layer_types is None and window and getattr(config, "use_sliding_window", True):
        refuse("sliding_window", window, "only full causal attention is supported")
    for field in LOGIT_CHANGES:
        value = getattr(config, field, None)
        if value is not None and value != 1:
            refuse(field, value, "only plain attention and a plain linear head are supported")


def refuse_adapter(path: str, adapter: PeftConfig, rank: int, alpha: float) -> None:
    """Raise ConfigError if the adapter is not a plain LoRA on the decoder's linear layers of the configured size."""

    def refuse(field: str, value, why: str) -> None:
        raise ConfigError(f"model.adapter: {path!r} has {field} = {value!r}: {why}")

    if adapter.peft_type != PeftType.LORA:
        refuse("peft_type", str(adapter.peft_type), "only LoRA is supported")
    for field, value, config_value in (("r", adapter.r, rank), ("lora_alpha", adapter.lora_alpha, alpha)):
        if value != config_value:
            key = {"r": "rank", "lora_alpha": "alpha"}[field]
            refuse(field, value, f"model.lora.{key} is {config_value}; set it to {value}")
    if adapter.lora_dropout:
        refuse("lora_dropout", adapter.lora_dropout, "dropout must be 0, or engine and learner differ")
    if adapter.bias != "none":
        refuse("bias", adapter.bias, "only 'none' is supported")
    for field in (
        "use_dora",
        "modules_to_save",
        "trainable_token_indices",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
    ):
        if value := getattr(adapter, field, None):
            refuse(field, value, "only plain LoRA is supported")


def refuse_head(field: str, module_names: list[str]) -> None:
    """Raise ConfigError if a trainable or adapted module is the head or the embedding (often the same tensor)."""
    for name in module_names:
        if name.rpartition(".")[2] in ("lm_head", "embed_tokens", "embed_out"):
            raise ConfigError(f"{field}: an adapter on {name!r} is not supported: the head and embedding stay frozen")


def _rope_types(rope: dict) -> list[str]:
    nested = [kind for value in rope.values() if isinstance(value, dict) for kind in _rope_types(value)]
    return nested + ([rope["rope_type"]] if "rope_type" in rope else [])
