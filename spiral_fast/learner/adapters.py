"""Several adapters, one after another, on one model in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file

from spiral_fast.config import ConfigError, LoraConfig
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.refusals import refuse_adapter
from spiral_fast.learner.roles import WEIGHTS, adapter_folders


class Adapters:
    """Puts the weights of other adapters of the same shape in place of the loaded one's, or of the loaded two.

    An engine over the model must be told by `set_policy` after each change.
    """

    def __init__(self, loaded: LoadedModel, lora: LoraConfig):
        self._weights = {  # by role; shares the model's memory
            role: get_peft_model_state_dict(loaded.model, adapter_name=role) for role in loaded.roles.names
        }
        self._first = {
            role: {name: weight.clone() for name, weight in own.items()} for role, own in self._weights.items()
        }
        self._lora = lora

    def check(self, folder: Path) -> None:
        """Raise ConfigError unless `use` would put this adapter in place."""
        self._read(folder)

    @torch.no_grad()
    def use(self, folder: Path | None) -> None:
        """The adapter of `folder`, or both of them; None: what the model was loaded with."""
        weights = self._first if folder is None else self._read(folder)
        for role, own in self._weights.items():
            for name, weight in own.items():
                weight.copy_(weights[role][name])

    def _read(self, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
        return {role: self._read_one(own, role) for role, own in adapter_folders(folder, list(self._weights)).items()}

    def _read_one(self, folder: Path, role: str) -> dict[str, torch.Tensor]:
        try:
            refuse_adapter(str(folder), PeftConfig.from_pretrained(folder), self._lora.rank, self._lora.alpha)
            weights = load_file(folder / WEIGHTS)
        except ConfigError:
            raise
        except Exception as error:  # of any class: the readers of these files do not expect broken ones
            raise ConfigError(f"{str(folder)!r} cannot be loaded ({' '.join(str(error).split())})") from error
        shapes, wanted = ({name: tuple(w.shape) for name, w in part.items()} for part in (weights, self._weights[role]))
        for name in sorted(shapes.keys() ^ wanted.keys()):
            raise ConfigError(f"{str(folder)!r} is on other layers than model.lora.target_modules: {name!r}")
        for name in (name for name in wanted if wanted[name] != shapes[name]):
            raise ConfigError(f"{str(folder)!r} has {name!r} of shape {shapes[name]}, the model needs {wanted[name]}")
        return weights
