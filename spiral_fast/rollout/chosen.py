"""Which engine `rollout.engine: auto` is, and whose cache it has."""

from __future__ import annotations

import importlib.util
from typing import Literal

from spiral_fast.config import ConfigError, RolloutConfig
from spiral_fast.install import install_command


def chosen_engine(rollout: RolloutConfig, *, cuda: bool) -> Literal["radix", "sglang"]:
    """`cuda`: the model lies on a GPU."""
    if rollout.engine != "auto":
        return rollout.engine
    return "sglang" if rollout.servers or (cuda and sglang_installed()) else "radix"


def cache_tokens(rollout: RolloutConfig, *, cuda: bool) -> int | None:
    """What rollout.cache_tokens bounds; None: an SGLang server sizes its own cache, on a GPU and by URL."""
    sizes_itself = chosen_engine(rollout, cuda=cuda) == "sglang" and (cuda or rollout.servers)
    return None if sizes_itself else rollout.cache_tokens


def sglang_installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


def refuse_absent_sglang() -> None:
    """Raise ConfigError where a run that starts its own server could not."""
    if not sglang_installed():
        raise ConfigError(
            "rollout.engine: 'sglang' cannot be used: SGLang is not installed; run: "
            f"{install_command('sglang')}, or name rollout.servers, or set rollout.engine: radix"
        )
