"""What a learner leaves: a PEFT adapter (or one for search and one for aggregation) that plain peft loads, and its own
state, from which `restore` makes the same next steps bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from spiral_fast.config import ConfigError
from spiral_fast.learner.roles import WEIGHTS, adapter_folders, new_folders

if TYPE_CHECKING:
    from spiral_fast.learner.learner import Learner

T = TypeVar("T")

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


def save(learner: Learner, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors (two adapters: into search/ and aggregation/),
    optimizer.safetensors and learner.json into `folder`."""
    model = learner.policy.model
    for role, own in new_folders(folder, learner.policy.roles.names).items():
        own.mkdir(parents=True, exist_ok=True)
        whole = {name: _plain(tensor) for name, tensor in of_role(learner.parameters, role).items()}
        save_file(get_peft_model_state_dict(model, state_dict=whole, adapter_name=role), own / WEIGHTS)
        settings = copy(model.peft_config[role])
        if not isinstance(settings.target_modules, str):  # peft holds a set, in another order in each process
            settings.target_modules = sorted(settings.target_modules)
        settings.save_pretrained(own)
    state = learner.optimiser.state
    moments = {
        f"{name}.{moment}": _plain(state[parameter][moment])
        for name, parameter in learner.parameters.items()
        if parameter in state
        for moment in MOMENTS
    }
    save_file(moments, folder / "optimizer.safetensors")
    counters = {"policy_version": learner.policy_version, "optimiser_steps": learner.optimiser_steps}
    (folder / "learner.json").write_text(json.dumps(counters) + "\n")


@torch.no_grad()
def restore(learner: Learner, folder: Path) -> None:
    """Copy adapters, moments and counters of `save` into a learner of the same shape. Raises ValueError naming a tensor
    that does not fit, ConfigError for a checkpoint of the other `model.policy`."""
    names, found = learner.policy.roles.names, {}
    for role, own in adapter_folders(folder, names).items():
        if len(names) > 1 and own == folder:
            raise ConfigError(f"{str(folder)!r} holds one adapter: it is of model.policy: shared")
        found |= _weights(learner, own, role)
    for name, weight in found.items():
        learner.parameters[name].copy_(weight)
    moments = load_file(folder / "optimizer.safetensors")
    learner.optimiser.state.clear()
    for name, parameter in learner.parameters.items():
        if f"{name}.step" not in moments:
            continue
        state = learner.optimiser.state[parameter]
        state["step"] = moments[f"{name}.step"].to(parameter.device)
        for moment in MOMENTS[1:]:
            state[moment] = torch.zeros_like(parameter)
            state[moment].copy_(moments[f"{name}.{moment}"])
    counters = json.loads((folder / "learner.json").read_text())
    learner.policy_version = counters["policy_version"]
    learner.optimiser_steps = counters["optimiser_steps"]


def of_role(parameters: Mapping[str, T], role: str) -> dict[str, T]:
    """Those of one adapter, by peft's names, lora_A.<adapter>.weight."""
    return {name: value for name, value in parameters.items() if name.endswith(f".{role}.weight")}


def _weights(learner: Learner, folder: Path, role: str) -> dict[str, torch.Tensor]:
    """Of one adapter's file, by the learner's names."""
    weights, found = load_file(folder / WEIGHTS), {}
    for name, parameter in of_role(learner.parameters, role).items():
        (key,) = get_peft_model_state_dict(learner.policy.model, state_dict={name: parameter}, adapter_name=role)
        if key not in weights or weights[key].shape != parameter.shape:
            has = tuple(weights[key].shape) if key in weights else "no shape (it is missing)"
            raise ValueError(f"{folder}: {key!r} has shape {has}, the model expects {tuple(parameter.shape)}")
        found[name] = weights[key]
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
