"""The base model as a folder that SGLang can load, whatever `model.path` is, and what SGLang must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig
from transformers import AutoConfig, AutoModelForCausalLM

from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.model import source_of
from spiral_fast.learner.roles import ADAPTERS, adapter_folders

FILES = [
    "*.json",
    "*.safetensors",
    "*.model",
    "*.txt",
    "*.jinja",
]  # of a hub id: no code


@dataclass(frozen=True)
class BaseModel:
    folder: Path
    max_context: int  # tokens, as LoadedModel has it
    lora_modules: list[str]  # last names of the linear layers that may carry the adapter


def base_model(config: ModelConfig) -> BaseModel:
    """GGUF weights are dequantised into a folder of the cache, once. Raises ConfigError."""
    source = source_of(config.path)
    try:
        folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=FILES))
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        modules = config.lora.target_modules
        if modules == "all-linear":
            modules = _linear_layers(settings)
        if config.adapter is not None:
            for folder in adapter_folders(Path(config.adapter), ADAPTERS[config.policy]).values():
                own = PeftConfig.from_pretrained(folder).target_modules
                modules = [*modules, *([] if isinstance(own, str) else own)]
    except Exception as error:  # of any class: the readers of these files do not expect broken ones
        raise ConfigError(f"model.path: {config.path!r} cannot be served ({' '.join(str(error).split())})") from error
    return BaseModel(folder, settings.max_position_embeddings, sorted({name.rpartition(".")[2] for name in modules}))


def _linear_layers(settings) -> list[str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    return [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
