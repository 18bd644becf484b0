from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from spiral_fast.config import ConfigError, load_config
from spiral_fast.learner.adapters import Adapters
from spiral_fast.learner.model import load_model


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    return load_model(load_config("configs/demo.yaml").model, "cpu")


@pytest.fixture
def folder(loaded, tmp_path):
    """An adapter of the same shape with other weights."""
    loaded.model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: weight + 0.1 for name, weight in load_file(file).items()}, file)
    return tmp_path


@torch.no_grad()
def outputs(loaded):
    """Of every adapted layer on the same input."""
    layers = [module for module in loaded.model.modules() if isinstance(module, LoraLayer)]
    return torch.cat([layer(torch.linspace(-1, 1, layer.in_features)[None]).flatten() for layer in layers])


def test_swapping_and_back(loaded, folder):
    adapters = Adapters(loaded, load_config("configs/demo.yaml").model.lora)
    first, parameters = outputs(loaded), {name: id(p) for name, p in loaded.model.named_parameters()}
    adapters.use(folder)
    other = outputs(loaded)
    with_adapter = load_config("configs/demo.yaml", [f"model.adapter={folder}"]).model
    assert torch.equal(other, outputs(load_model(with_adapter, "cpu"))) and not torch.equal(first, other)
    adapters.use(None)
    assert torch.equal(outputs(loaded), first)
    assert {name: id(p) for name, p in loaded.model.named_parameters()} == parameters


def test_what_does_not_fit_is_refused_and_changes_nothing(loaded, folder):
    adapters = Adapters(loaded, load_config("configs/demo.yaml").model.lora)
    first, file = outputs(loaded), folder / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(iter(whole))
    for weights, message in (
        ({k: w for k, w in whole.items() if k != name}, "on other layers than model.lora.target_modules"),
        (whole | {"extra": torch.zeros(1)}, "on other layers"),
        (whole | {name: torch.zeros(1, 2)}, r"of shape \(1, 2\), the model needs"),
    ):
        save_file(weights, file)
        with pytest.raises(ConfigError, match=message):
            adapters.use(folder)
    file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        adapters.check(folder)
    assert torch.equal(outputs(loaded), first)
