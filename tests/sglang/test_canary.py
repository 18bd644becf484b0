"""What the canary must notice. The server is right in each case but the first; the learner beside it is another one."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from peft.tuners.lora import LoraLayer

from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.sglang.canary import CanaryFailed, check, check_server
from tests.sglang.test_client import with_client
from tests.sglang.test_engine import adapters_on
from tests.sglang.tiny_server import draw_adapter, load, make_config, save_model


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("modules", ["all-linear", ["k_proj", "down_proj"]])
def test_right_server_with_a_fresh_adapter(server, model_folder, temperature, modules):
    loaded = load(make_config(model_folder, lora={"target_modules": modules}), seed=None)
    before = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}

    async def use(client):
        before = adapters_on(server)
        await check_server(client, PolicySource(loaded), temperature)
        assert adapters_on(server) == before

    with_client(server, use)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad == ("lora_" in name)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, r"has log-prob .* its base model is not the learner's"),
        ({"vocab_size": 60}, "vocabulary has 50 tokens; the learner's has 60"),
        ({"vocab_size": 50, "hidden_size": 64}, "its base model is not the learner's"),
        ({"num_hidden_layers": 1}, "its base model is not the learner's"),
        ({"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}, "its base model is not the learner's"),
    ],
)
def test_wrong_base_model(server, tmp_path, changes, says):
    other = save_model(tmp_path / "other", **changes)
    source = PolicySource(load(make_config(other), seed=None))

    async def use(client):
        with pytest.raises(CanaryFailed, match=says) as failed:
            await check_server(client, source, 1.0)
        assert server.url in str(failed.value) and "\n" not in str(failed.value)
        assert await client.alive(20.0)

    with_client(server, use)


@pytest.mark.parametrize("named", ["float32", "float", "bfloat16", "half", "auto"])
def test_another_dtype(server, model_folder, named):
    """The server computes in float32 whatever it says; the first thing that is asked is its name."""
    source = PolicySource(load(make_config(model_folder), seed=None))

    async def use(client):
        client._identity = dataclasses.replace(await client.identity(), dtype=named)
        if named in ("float32", "float", "auto"):
            await check_server(client, source, 1.0)
        else:
            theirs = {"half": "float16"}.get(named, named)
            with pytest.raises(CanaryFailed, match=f"in {theirs}; the learner computes in float32: .* model.dtype"):
                await check_server(client, source, 1.0)

    with_client(server, use)


def lose_scale(loaded) -> None:
    for layer in loaded.model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["default"] = 1.0


def forget_one_layer(loaded) -> None:
    (*_, last) = (p for name, p in loaded.model.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        last.zero_()


@pytest.mark.parametrize(
    "change", [lambda loaded: draw_adapter(loaded, seed=2), lose_scale, forget_one_layer], ids=["old", "scale", "layer"]
)
def test_adapter_that_is_not_the_present_one(server, model_folder, change, request):
    loaded = load(make_config(model_folder))
    source = PolicySource(loaded)
    name = f"canary-{request.node.callspec.id}"

    async def use(client):
        await client.load_adapter(name, source.adapter())
        assert await check(client, name, source, 0.7) <= 1e-4
        change(loaded)
        with pytest.raises(CanaryFailed) as failed:
            await check(client, name, source, 0.7)
        theirs, ours = re.search(r"log-prob (\S+) there and (\S+) at the learner", str(failed.value)).groups()
        assert abs(float(theirs) - float(ours)) > 1e-3
        assert f"{name!r} is not the learner's present adapter" in str(failed.value)
        await client.unload_adapter(name)

    with_client(server, use)


def test_another_temperature(server, model_folder):
    class Untempered(PolicySource):
        def log_probs(self, prompt, tokens, temperature, role=None):
            return super().log_probs(prompt, tokens, 1.0, role)

    source = Untempered(load(make_config(model_folder)))

    async def use(client):
        await client.load_adapter("warm", source.adapter())
        with pytest.raises(CanaryFailed):
            await check(client, "warm", source, 0.7)
        await client.unload_adapter("warm")

    with_client(server, use)


def test_unknown_adapter(server, model_folder):
    source = PolicySource(load(make_config(model_folder)))

    async def use(client):
        with pytest.raises(CanaryFailed, match="never been loaded: nobody"):
            await check(client, "nobody", source, 1.0)

    with_client(server, use)
