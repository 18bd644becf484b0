"""What a learner leaves: a PEFT adapter that plain peft loads, and its own state, from which `restore` makes the same
next steps bit for bit."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from spiral_fast.learner.learner import Learner

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


def save(learner: Learner, folder: Path) -> None:
    """Write adapter_config.json, adapter_model.safetensors, optimizer.safetensors and learner.json into `folder`."""
    model = learner.policy.model
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: _plain(tensor) for name, tensor in learner.parameters.items()}
    save_file(get_peft_model_state_dict(model, state_dict=whole), folder / "adapter_model.safetensors")
    settings = copy(model.active_peft_config)
    if not isinstance(settings.target_modules, str):  # peft holds a set, in another order in each process
        settings.target_modules = sorted(settings.target_modules)
    settings.save_pretrained(folder)
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
    """Copy adapter, moments and counters of `save` into a learner of the same shape. Raises ValueError naming a tensor
    that does not fit."""
    whole = {name: _plain(tensor) for name, tensor in learner.parameters.items()}
    file_key = {
        key: name
        for name in whole
        for key in get_peft_model_state_dict(learner.policy.model, state_dict={name: whole[name]})
    }
    weights = load_file(folder / "adapter_model.safetensors")
    for key, name in file_key.items():
        if key not in weights or weights[key].shape != whole[name].shape:
            found = tuple(weights[key].shape) if key in weights else "no shape (it is missing)"
            raise ValueError(f"{folder}: {key!r} has shape {found}, the model expects {tuple(whole[name].shape)}")
    for key, name in file_key.items():
        learner.parameters[name].copy_(weights[key])
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


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
