"""Which versions on which machine: what a reader needs to repeat a run."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = (
    "spiral-fast",
    "torch",
    "transformers",
    "peft",
    "triton",
    "numpy",
    "numba",
    "safetensors",
    "tokenizers",
    "math-verify",
    "reasoning-gym",
    "liger-kernel",
    "flash-attn",
    "bitsandbytes",
)


def version(package: str) -> str | None:
    """Version of an installed package; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Python, package versions, processor, threads and GPUs. Imports torch."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "packages": {package: version(package) for package in PACKAGES},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
