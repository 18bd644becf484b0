"""The policy as an engine in another process needs it: the tensors of its adapter or both, and the learner's own
log-probs to check that they arrived."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from spiral_fast.learner import fsdp
from spiral_fast.learner.checkpoint import of_role
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.packed import pack
from spiral_fast.learner.policy import Policy


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter under PEFT's names, for example `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`."""

    tensors: dict[str, torch.Tensor]  # CPU, float32, contiguous, of its own memory; A (r, in), B (out, r)
    config: dict[str, Any]  # adapter_config.json; target_modules is a list, lora_alpha / r the true scale
    linears: dict[str, tuple[int, int]]  # (out, in) of every linear layer of the decoder, adapted or not

    @property
    def rank(self) -> int:
        return self.config["r"]


class PolicySource:
    """Reads the model of a LoadedModel as it is at each call, also while FSDP holds its base sharded; on several ranks
    log-probs can then be read inside `Learner.rollout_weights` alone."""

    def __init__(self, loaded: LoadedModel):
        self.model = loaded.model
        self.roles = loaded.roles
        self.vocabulary: int = loaded.model.config.vocab_size
        self.dtype: torch.dtype = loaded.causal_lm.get_output_embeddings().weight.dtype  # of the base
        self.max_context: int = loaded.max_context
        self.eos_token_ids = loaded.eos_token_ids
        self._linears = dict(_linear_layers(loaded.model))

    def adapter(self, role: str | None = None) -> Adapter:
        """Of one of `roles`; None: the first."""
        role = role or self.roles.names[0]
        layers = {name: layer for name, layer in self.model.named_modules() if isinstance(layer, LoraLayer)}
        (scaling,) = {layer.scaling[role] for layer in layers.values()}
        whole = {name: _copy(p) for name, p in of_role(dict(self.model.named_parameters()), role).items()}
        settings = self.model.peft_config[role]
        config = json.loads(json.dumps(settings.to_dict(), default=_plain))
        config["target_modules"] = sorted({name.rpartition(".")[2] for name in layers})
        config["lora_alpha"] = scaling * settings.r
        tensors = get_peft_model_state_dict(self.model, state_dict=whole, adapter_name=role)
        return Adapter(tensors, config, self._linears)

    @torch.no_grad()
    def log_probs(
        self, prompt: Sequence[int], tokens: Sequence[int], temperature: float, role: str | None = None
    ) -> np.ndarray:
        """(len(tokens),) float32 log-probs of `tokens` after `prompt`, both non-empty, at the sampling temperature."""
        with _plain_weights(self.model):
            packed = pack([(prompt, tokens)], self.model.device, role or self.roles.names[0])
            return Policy(self.model)(packed, temperature).logp.float().cpu().numpy()

    def base_log_probs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> np.ndarray:
        """The same without an adapter."""
        with _without_adapter(self.model):
            return self.log_probs(prompt, tokens, temperature)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", module)
        inside = ".lora_" in name or name.endswith(".base_layer")
        if isinstance(base, nn.Linear) and ".layers." in name and not inside:
            yield name, (base.out_features, base.in_features)


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True).contiguous()


def _plain(value: Any) -> Any:
    """What PEFT's config holds and JSON does not know."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))


@contextmanager
def _without_adapter(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    before = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling.update(scaling)


@contextmanager
def _plain_weights(model: nn.Module) -> Iterator[None]:
    """Within: no parameter is sharded that a forward of `model` would find so. FSDP unshards a decoder layer by itself;
    what the root group holds (embedding, last norm, head) belongs to a module around `model`."""
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and fsdp.local(parameter) is not parameter
    ]
    try:
        for module, name, parameter in held:
            module._parameters[name] = nn.Parameter(fsdp.local(parameter.detach()), requires_grad=False)
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter
