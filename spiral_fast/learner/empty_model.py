"""The model of a config.json with its adapter on it, without weights: shapes alone, on torch's device `meta`."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.model import errors_in_one_line, source_of, with_adapter
from spiral_fast.supported import check_config, check_modules


def empty_model(config: ModelConfig, model: Path | None = None) -> PeftModel:
    """As `load_model` would make it, but for the device. model: a config.json or its folder; None = `config.path`.

    Raises ConfigError in one line.
    """
    if model is not None and not (model / "config.json" if model.is_dir() else model).is_file():
        raise ConfigError(f"--model: {str(model)!r} is neither a config.json nor a folder with one")
    path = config.path if model is None else str(model)
    try:
        with errors_in_one_line(path):
            settings = AutoConfig.from_pretrained(source_of(path) if model is None else path, trust_remote_code=False)
            check_config(settings)
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(
                    settings, dtype=getattr(torch, config.dtype), trust_remote_code=False
                )
            check_modules(base)
    except ConfigError as error:
        if model is not None or "hub id" not in str(error):
            raise
        raise ConfigError(
            f"model.path: {path!r} is not on this machine and could not be fetched; give its config.json (a few "
            "hundred bytes, no weights): --model FILE"
        ) from error
    base.requires_grad_(False)
    base.set_attn_implementation(ATTENTION)
    with warnings.catch_warnings():  # peft reads a name that transformers 5.24 renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return with_adapter(base, config.model_copy(update={"adapter": None})).eval()
