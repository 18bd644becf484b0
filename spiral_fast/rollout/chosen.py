"""Which engine `rollout.engine: auto` is."""

from __future__ import annotations

import importlib.util
from typing import Literal

from spiral_fast.config import RolloutConfig


def chosen_engine(rollout: RolloutConfig, *, cuda: bool) -> Literal["radix", "sglang"]:
    """`cuda`: the model lies on a GPU."""
    if rollout.engine != "auto":
        return rollout.engine
    return "sglang" if rollout.servers or (cuda and sglang_installed()) else "radix"


def sglang_installed() -> bool:
    return importlib.util.find_spec("sglang") is not None
