"""A frozen base in 8 or 4 bits, by bitsandbytes: its linear layers alone, with the adapter on top in full precision.

int8: rows of weights, and of activations as they come, in 8 bits (no outlier columns kept apart: which ones would
depend on the batch). nf4: blocks of 64 weights in 4 bits, multiplied in the model's dtype. Embedding, norms and head
stay in the model's dtype.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.install import install_command
from spiral_fast.supported import UnsupportedModel

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PretrainedConfig


def refuse_quantisation(config: ModelConfig, device: torch.device | str) -> None:
    """Raise ConfigError where model.quantisation cannot be used."""
    if config.quantisation == "none":
        return
    reason = None
    if torch.device(device).type != "cuda":
        reason = f"it runs on a GPU only, the model is on {torch.device(device).type}; set it to none"
    elif importlib.util.find_spec("bitsandbytes") is None:
        reason = f"bitsandbytes is not installed: {install_command('quantised')}"
    if reason:
        raise ConfigError(f"model.quantisation: {config.quantisation!r} cannot be used: {reason}")


def refuse_stored(settings: PretrainedConfig) -> None:
    """Raise UnsupportedModel for a checkpoint that is quantised on disk."""
    if getattr(settings, "quantization_config", None) is not None:
        raise UnsupportedModel("is stored quantised (quantization_config): use plain weights, and model.quantisation")


def settings_of(quantisation: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """For transformers' from_pretrained."""
    if quantisation == "none":
        return None
    from transformers import BitsAndBytesConfig

    if quantisation == "int8":
        # at every call it warns that activations pass through float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def is_quantised(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("bitsandbytes.")


def weight_of(layer: nn.Linear) -> torch.Tensor:
    """(out, in) what the weight of a linear layer stands for; a plain layer's is the weight itself."""
    if not is_quantised(layer):
        return layer.weight
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    if (blocks := getattr(layer.weight, "quant_state", None)) is not None:
        return dequantize_4bit(layer.weight.data, blocks)
    scale = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB  # it moves at the first forward
    return int8_vectorwise_dequant(layer.weight.data, scale)
