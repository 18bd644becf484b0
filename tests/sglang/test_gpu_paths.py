"""What is done on GPUs only, as far as a server without one can answer: adapters by way of a folder, as with tensor
parallelism, and the memory of the KV cache given back and taken again."""

from __future__ import annotations

import dataclasses

import pytest

from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import generate
from spiral_fast.rollout.sglang.client import Client, RequestRefused
from tests.sglang.test_client import PROMPTS, gap, sample, with_client
from tests.sglang.test_engine import gaps, make_engine, random_prompts, request
from tests.sglang.tiny_server import draw_adapter, load, make_config


def as_if_parallel(client: Client) -> None:
    client._identity = dataclasses.replace(client._identity, tensor_parallel=2)


def test_an_adapter_by_way_of_a_folder(server, model_folder, tmp_path):
    source = PolicySource(load(make_config(model_folder, lora={"target_modules": ["q_proj", "down_proj"]})))

    async def use(client):
        await client.identity()
        as_if_parallel(client)
        with pytest.raises(RequestRefused, match="with tensor parallelism it reads a folder, and none was named"):
            await client.load_adapter("by-folder", source.adapter())
        client._adapter_folder = tmp_path / "adapters"
        await client.load_adapter("by-folder", source.adapter())
        assert (tmp_path / "adapters" / "by-folder" / "adapter_model.safetensors").exists()
        for prompt in PROMPTS:
            assert gap(source, prompt, await sample(client, prompt, "by-folder")) <= 1e-4
        await client.unload_adapter("by-folder")
        assert not any((tmp_path / "adapters").iterdir())

    with_client(server, use)


def test_memory_is_given_back_between_rollouts_and_taken_again(server, model_folder):
    """The calls in their order; a CPU has nothing to give back."""
    loaded = load(make_config(model_folder))
    engine = make_engine(loaded, [server], shares_gpu=True)
    calls = []
    try:
        for version in range(2):
            draw_adapter(loaded, version + 1)
            engine.set_policy(version)
            if not version:
                client = engine._fleet.servers[0].client
                for name in ("release_memory", "resume_memory", "load_adapter", "flush"):
                    _record(client, name, calls)
            asked = [request(prompt, problem=f"m{p}") for p, prompt in enumerate(random_prompts(21, 3))]
            assert max(gaps(loaded, asked, generate(engine, asked))) <= 1e-4
            engine.set_policy(version)  # the rollout is over
        assert calls == ["flush", "release_memory", "resume_memory", "load_adapter", "flush", "flush", "release_memory"]
        asked = [request(PROMPTS[3], problem="again")]
        (done,) = generate(engine, asked)  # an evaluation, without an update before it
        assert calls[7:] == ["resume_memory"] and gaps(loaded, asked, [done])[0] <= 1e-4
    finally:
        engine.close()


def _record(client: Client, name: str, calls: list[str]) -> None:
    real = getattr(client, name)

    async def recorded(*arguments):
        calls.append(name)
        return await real(*arguments)

    setattr(client, name, recorded)
