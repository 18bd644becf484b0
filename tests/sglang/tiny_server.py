"""A tiny model that SGLang serves in its own way on a CPU, configs for it, and an adapter that does something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spiral_fast.config import Config
from spiral_fast.learner.model import LoadedModel, load_model
from tests.learner.tiny import base_model, save_tokenizer

RANK, ALPHA = 4, 6.0  # scale 1.5: a scale that is lost shows


def save_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Qwen3, float32, 50 tokens, context 256. Intermediate sizes that are no multiple of 32 SGLang would pad on a CPU,
    but not the adapter's."""
    settings: dict[str, Any] = {"head_dim": 16, "intermediate_size": 64} | changes
    base_model("qwen3", torch.float32, seed, **settings).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_config(
    model: Path | str,
    run_dir: Path | str = "unused",
    *,
    rollout: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **other: Any,
) -> Config:
    """A config that uses engine sglang with a small cache; `rollout`, `lora` and sections of `other` on top."""
    sglang = {"timeout_s": 20.0, "start_timeout_s": 300.0} | (rollout or {}).get("sglang", {})
    small = {"engine": "sglang", "cache_tokens": 8192, "max_running": 32, "prefill_chunk": 2048}
    return Config.model_validate(
        {
            "run_dir": str(run_dir),
            "model": {
                "path": str(model),
                "dtype": "float32",
                "lora": {"rank": RANK, "alpha": ALPHA} | (lora or {}),
            },
            "problems": {"source": "chain_sum"},
            "rollout": small | (rollout or {}) | {"sglang": sglang},
        }
        | other
    )


def load(config: Config, *, seed: int | None = 1) -> LoadedModel:
    """The learner's model; `seed`: of B matrices that are not zero, None = a fresh adapter."""
    torch.manual_seed(0)
    loaded = load_model(config.model, "cpu")
    if seed is not None:
        draw_adapter(loaded, seed)
    return loaded


def draw_adapter(loaded: LoadedModel, seed: int) -> None:
    """Other B matrices, as an update would leave."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
