"""What the learner cannot train exactly is refused by name, before a step is made."""

from __future__ import annotations

from peft import PeftConfig, PeftType
from transformers import PretrainedConfig

from spiral_fast.config import Config, ConfigError
from spiral_fast.supported import windowed_layer


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


def refuse_windows(config: Config, model: PretrainedConfig) -> None:
    """Raise ConfigError if the model has layers with sliding windows and the config asks for what has none."""
    layer = windowed_layer(model)
    if layer is None:
        return
    if config.learner.sharing != "none":
        raise ConfigError(
            f"learner.sharing: {config.learner.sharing!r} cannot be used: the model's {layer}, and prefix trees have "
            "full causal attention only; set learner.sharing: none"
        )
    if config.rollout.batch_invariant:
        raise ConfigError(f"rollout.batch_invariant: true cannot be used: the model's {layer}; set it to false")
