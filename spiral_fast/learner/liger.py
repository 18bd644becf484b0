"""Liger's fused kernels in a loaded model: RMSNorm, SiLU times gate, rotary embedding; the loss stays ours.

Liger's own patching replaces classes and functions for the whole process; here three forwards of this one model's
modules are replaced, and what they call within (adapted linear layers, attention) stays. Engine and learner run the
same modules, so both have it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import FunctionType, MethodType
from typing import Literal

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.install import install_command

# Whose norm, MLP and attention do what Liger's kernels do; names as transformers has them, with `ForCausalLM`.
ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def use_liger(model: PreTrainedModel, wanted: bool | Literal["auto"], device: torch.device | str) -> bool:
    """Whether `model` has Liger's kernels from now on. Raises ConfigError where they are wanted and cannot be."""
    activation = getattr(model.config, "hidden_act", "")
    reason = why_not(type(model).__name__, activation, torch.device(device)) if wanted else "not wanted"
    if reason is None:
        replace(model)
    elif wanted is True:
        raise _refusal(reason)
    return reason is None


def liger_line(config: ModelConfig, device: str) -> str:
    """What `model.liger` comes to for a model that is not loaded, as `doctor` says it. Raises ConfigError."""
    if not config.liger:
        return "Liger: not used (model.liger is false)"
    reason = why_not(f"{ARCHITECTURES[0]}ForCausalLM", "silu", torch.device(device))
    if reason is None:
        from spiral_fast.learner.model import source_of

        try:
            found = AutoConfig.from_pretrained(source_of(config.path), trust_remote_code=False, local_files_only=True)
        except OSError:  # not on this machine yet
            return f"Liger: used if the model is one of {', '.join(ARCHITECTURES)}"
        activation = getattr(found, "hidden_act", "")
        reason = why_not((found.architectures or ["model"])[0], activation, torch.device(device))
    if reason is not None and config.liger is True:
        raise _refusal(reason)
    return "Liger: used" if reason is None else f"Liger: not used ({reason})"


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"model.liger: true cannot be used: {reason}; set it to auto")


def why_not(class_name: str, activation: str, device: torch.device) -> str | None:
    """Why a model cannot have Liger's kernels; None if it can."""
    if device.type != "cuda":
        return f"its kernels run on CUDA only, the model is on {device.type}"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed: {install_command('gpu')}"
    if class_name.removesuffix("ForCausalLM") not in ARCHITECTURES:
        return f"the model is a {class_name}, not one of {', '.join(ARCHITECTURES)}"
    if activation not in ("silu", "swish"):
        return f"the model's activation is {activation}, not SiLU"
    return None


def replace(model: PreTrainedModel) -> None:
    """Give the norms, MLPs and attentions of `model` Liger's kernels, in place."""
    from liger_kernel.transformers.functional import liger_rope

    of, name = sys.modules[type(model).__module__], type(model).__name__.removesuffix("ForCausalLM")
    norm, mlp, attention = (getattr(of, name + part) for part in ("RMSNorm", "MLP", "Attention"))
    # transformers' attention calls its rotary embedding by a global name: the same code with another function there
    rotated = _with_global(inspect.unwrap(attention.forward), "apply_rotary_pos_emb", liger_rope)
    forwards = {norm: _norm, mlp: _mlp, attention: rotated}
    for module in model.modules():
        if forward := forwards.get(type(module)):
            module.forward = MethodType(forward, module)


def _norm(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    # in_place would write the gradient of the input over that of the output, which is another's tensor
    return liger_rms_norm(hidden, self.weight, self.variance_epsilon, 0.0, "llama", False)


def _mlp(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    # its backward writes the gradients over gate and up: nobody else keeps these two
    return self.down_proj(liger_swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


def _with_global(function: FunctionType, name: str, value: object) -> FunctionType:
    """`function`, in which the global `name` is `value`."""
    if name not in function.__globals__:
        raise ConfigError(f"model.liger: this version of transformers has no {name}; set it to false")
    changed = FunctionType(
        function.__code__, function.__globals__ | {name: value}, function.__name__, function.__defaults__
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
