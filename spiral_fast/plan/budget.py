"""What must lie on a GPU at once whatever a step looks like, added up before any weight is read."""

from __future__ import annotations

import torch

from spiral_fast import ranks
from spiral_fast.config import Config, ConfigError
from spiral_fast.learner.empty_model import empty_model
from spiral_fast.plan.memory import held, micro_of, resting
from spiral_fast.plan.shape import Shape, shape_of
from spiral_fast.rollout.chosen import chosen_engine


def check_budget(config: Config, device: str) -> None:
    """Raise ConfigError for a run that a GPU cannot hold; nothing on the CPU, nor for a quantised base and decoder
    layers whose memory `plan` does not know. The model's config is enough. Draws from torch's global RNG."""
    if device != "cuda" or config.model.quantisation != "none":
        return
    try:
        shape = shape_of(empty_model(config.model))
    except ConfigError:  # loading says it better
        return
    refuse(config, shape, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, ranks.size())


def refuse(config: Config, shape: Shape, memory: int, n_ranks: int) -> None:
    """memory: bytes of each rank's GPU. Counted are weights, adapter, moments, gradient and a full KV cache of the
    embedded engine: no activations, which are an estimate (`spiral-fast plan`, and a line at the start of a run)."""
    micro = micro_of(config, 0, n_ranks)
    learning = held(shape, micro)
    embedded = chosen_engine(config.rollout, cuda=True) == "radix"
    rollout = resting(shape, micro, sampling=embedded)
    if embedded:
        rollout["KV cache"] = config.rollout.cache_tokens * shape.kv_bytes
    over = sum(rollout.values()) - memory
    if embedded and over > 0:
        room = int((memory - sum(rollout.values()) + rollout["KV cache"]) / shape.kv_bytes)
        if room > 0:
            raise ConfigError(
                f"rollout.cache_tokens: {config.rollout.cache_tokens}: {_words(rollout)} are more than the GPU's "
                f"{memory / 1e9:.1f} GB; lower it below {room}"
            )
    for parts, during in ((learning, "learning"), (rollout, "rollout")):
        if sum(parts.values()) > memory:
            change = "" if config.learner.offload_base else ": learner.fsdp=true with more ranks, or offload_base=true"
            raise ConfigError(
                f"model.path: {config.model.path!r} does not fit: {_words(parts)} during {during} are more than the "
                f"GPU's {memory / 1e9:.1f} GB; a larger GPU, or a smaller model{change}"
            )


def _words(parts: dict[str, float]) -> str:
    return " + ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size) + " GB"
