"""An adapter on its way to an SGLang server: what SGLang makes of PEFT's tensors, and the bytes that carry them.

SGLang computes q, k and v in one product, gate and up in another, and stacks their adapter matrices. An adapter with a
part of such a group it refuses (q alone) or dies of (k alone); so what is missing is sent as zeros.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spiral_fast.learner.policy_source import Adapter

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fused_names(modules: Iterable[str]) -> list[str]:
    """The module names with every member of a group of which one is there."""
    names = set(modules)
    return sorted(names.union(*(group for group in FUSED if names.intersection(group))))


def for_sglang(adapter: Adapter) -> Adapter:
    """The same function, with whole groups."""
    tensors = dict(adapter.tensors)
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    for name in adapted:
        parent, _, module = name.rpartition(".")
        for group in (group for group in FUSED if module in group):
            for missing in (f"{parent}.{member}" for member in group):
                if missing not in adapted and missing in adapter.linears:
                    n_out, n_in = adapter.linears[missing]
                    tensors[f"{missing}.lora_A.weight"] = torch.zeros(adapter.rank, n_in)
                    tensors[f"{missing}.lora_B.weight"] = torch.zeros(n_out, adapter.rank)
    modules = fused_names(adapter.config["target_modules"])
    return Adapter(tensors, adapter.config | {"target_modules": modules}, adapter.linears)


def as_request(name: str, adapter: Adapter) -> dict[str, Any]:
    """Body of /load_lora_adapter_from_tensors for one GPU. SGLang takes a pickle; this one holds the bytes themselves
    and no handle of this machine's memory, and is read there by an unpickler that knows tensors alone. Nothing that a
    server sends is unpickled here."""
    payload = pickle.dumps(dict(adapter.tensors))
    return {
        "lora_name": name,
        "config_dict": adapter.config,
        "serialized_named_tensors": [base64.b64encode(payload).decode()],
    }


def write(adapter: Adapter, folder: Path) -> None:
    """As PEFT would, for a server that reads the folder itself."""
    folder.mkdir(parents=True)
    save_file(adapter.tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config) + "\n")
