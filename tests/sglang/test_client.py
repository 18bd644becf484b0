"""One server, spoken to as the engine does; the learner's own log-probs are the truth."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from spiral_fast.learner.policy_source import Adapter, PolicySource
from spiral_fast.rollout.sglang.client import Client, RequestRefused
from tests.sglang.tiny_server import draw_adapter, load, make_config

PROMPTS = [[7, 3, 9, 2, 11, 4, 8], [7, 3, 9, 2, 40, 41], [1], list(range(6, 40))]


def with_client(server, use):
    """Run `use(client)` in a loop of its own."""

    async def main():
        client = Client(server.url, server.api_key, timeout_s=20.0)
        try:
            return await use(client)
        finally:
            await client.aclose()

    return asyncio.run(main())


async def sample(client: Client, prompt, adapter, temperature=1.0, max_new_tokens=20):
    return await client.generate(
        prompt, adapter=adapter, max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=[5]
    )


def gap(source: PolicySource, prompt, generated, temperature=1.0) -> float:
    assert len(generated.tokens) == len(generated.logp) > 0
    ours = source.log_probs(prompt, generated.tokens, temperature)
    return float(np.abs(generated.logp - ours).max())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_the_learners(server, model_folder, temperature):
    source = PolicySource(load(make_config(model_folder)))

    async def use(client):
        await client.load_adapter(f"t{temperature}", source.adapter())
        twice = [prompt for prompt in PROMPTS for _ in range(2)]  # the second time with a prefix from the cache
        out = [await sample(client, prompt, f"t{temperature}", temperature) for prompt in twice]
        await client.unload_adapter(f"t{temperature}")
        return list(zip(twice, out, strict=True))

    found = with_client(server, use)
    for prompt, generated in found:
        assert gap(source, prompt, generated, temperature) <= 1e-4
        assert generated.prompt_tokens == len(prompt)
        if generated.finish_reason == "stop":
            assert generated.tokens[-1] == 5
        assert 5 not in generated.tokens[:-1]
    assert [generated.cached_tokens for _, generated in found[1::2]] == [len(prompt) - 1 for prompt in PROMPTS]
    base = [np.abs(source.base_log_probs(p, g.tokens, temperature) - g.logp).max() for p, g in found]
    assert min(base) > 1e-2  # the adapter does something


def test_prompt_log_probs(server, model_folder):
    source = PolicySource(load(make_config(model_folder)))
    tokens = PROMPTS[0] + PROMPTS[1]

    async def use(client):
        await client.load_adapter("prompt", source.adapter())
        out = [await client.prompt_log_probs(tokens, adapter=name) for name in ("prompt", None)]
        await client.unload_adapter("prompt")
        return out

    adapted, base = with_client(server, use)
    np.testing.assert_allclose(adapted, source.log_probs(tokens[:1], tokens[1:], 1.0), rtol=0, atol=1e-4)
    np.testing.assert_allclose(base, source.base_log_probs(tokens[:1], tokens[1:], 1.0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("modules", [["q_proj"], ["k_proj"], ["v_proj", "up_proj"], ["gate_proj"], ["o_proj"]])
def test_adapter_on_some_modules(server, model_folder, modules):
    """SGLang itself refuses q_proj alone and dies of k_proj alone."""
    name = "_".join(modules)
    source = PolicySource(load(make_config(model_folder, lora={"target_modules": modules, "rank": 3, "alpha": 7.0})))

    async def use(client):
        await client.load_adapter(name, source.adapter())
        out = await sample(client, PROMPTS[0], name)
        await client.unload_adapter(name)
        return out

    generated = with_client(server, use)
    assert gap(source, PROMPTS[0], generated) <= 1e-4
    assert np.abs(source.base_log_probs(PROMPTS[0], generated.tokens, 1.0) - generated.logp).max() > 1e-3


def test_every_tensor_sent_is_applied(server, model_folder):
    """Each layer's adapter alone, so that one that was left out would show."""
    loaded = load(make_config(model_folder))
    source = PolicySource(loaded)
    layers = sorted({name for name, _ in loaded.model.named_parameters() if "lora_B" in name})
    assert len(layers) == 14

    async def use(client):
        for number, only in enumerate(layers):
            draw_adapter(loaded, seed=number)
            with torch.no_grad():
                for name, parameter in loaded.model.named_parameters():
                    if "lora_B" in name and name != only:
                        parameter.zero_()
            await client.load_adapter(f"only{number}", source.adapter())
            generated = await sample(client, PROMPTS[3], f"only{number}", max_new_tokens=5)
            assert gap(source, PROMPTS[3], generated) <= 1e-4, only
            base = source.base_log_probs(PROMPTS[3], generated.tokens, 1.0)
            assert np.abs(base - generated.logp).max() > 1e-3, only
            await client.unload_adapter(f"only{number}")

    with_client(server, use)


def test_a_name_used_again(server, model_folder):
    """Refused while the name is in use; after it, the new weights and none of the old keys and values."""
    loaded = load(make_config(model_folder))
    source = PolicySource(loaded)
    first = source.adapter()

    async def use(client):
        await client.load_adapter("again", first)
        assert gap(source, PROMPTS[3], await sample(client, PROMPTS[3], "again")) <= 1e-4
        draw_adapter(loaded, seed=2)
        with pytest.raises(RequestRefused, match="already loaded"):
            await client.load_adapter("again", source.adapter())
        assert gap(source, PROMPTS[3], await sample(client, PROMPTS[3], "again")) > 1e-2
        await client.unload_adapter("again")
        await client.load_adapter("again", source.adapter())
        generated = await sample(client, PROMPTS[3], "again")
        await client.unload_adapter("again")
        return generated

    generated = with_client(server, use)
    assert generated.cached_tokens == 0
    assert gap(source, PROMPTS[3], generated) <= 1e-4


def test_what_a_server_refuses(server, model_folder):
    adapter = PolicySource(load(make_config(model_folder))).adapter()

    async def use(client):
        with pytest.raises(RequestRefused, match="never been loaded: nobody"):
            await sample(client, PROMPTS[0], "nobody")
        await client.load_adapter("gone", adapter)
        await client.unload_adapter("gone")
        with pytest.raises(RequestRefused, match="gone"):
            await sample(client, PROMPTS[0], "gone")
        with pytest.raises(RequestRefused, match="300 tokens of prompt: .*longer than the model's context"):
            await sample(client, [9] * 300, None)
        with pytest.raises(RequestRefused, match="it cut the trace|context"):
            for _ in range(20):  # one that does not stop before
                await sample(client, PROMPTS[3], None, max_new_tokens=256)
        identity = await client.identity()
        assert identity.vocabulary == 50
        with pytest.raises(RequestRefused, match="token 50 is beyond its vocabulary of 50"):
            await sample(client, [3, 50], None)
        with pytest.raises(RequestRefused, match="rank 9 is above its 8"):
            await client.load_adapter("big", Adapter({}, {"r": 9, "target_modules": ["q_proj"]}, {}))
        with pytest.raises(RequestRefused, match="it takes no adapter on c_attn"):
            await client.load_adapter("odd", Adapter({}, {"r": 4, "target_modules": ["c_attn"]}, {}))
        stranger = Client(server.url, "another key")
        with pytest.raises(RequestRefused, match="SPIRAL_FAST_SERVER_KEY"):
            await sample(stranger, PROMPTS[0], None)
        await stranger.aclose()
        assert len((await sample(client, PROMPTS[0], None)).tokens) > 0  # and it lives

    with_client(server, use)


def test_the_whole_context_can_be_used(server):
    async def use(client):
        for n_prompt in (255, 240):
            for _ in range(50):  # most stop before
                out = await sample(client, [9] * n_prompt, None, max_new_tokens=256 - n_prompt)
                if out.finish_reason == "length":
                    assert len(out.tokens) == 256 - n_prompt
                    break
            else:
                pytest.fail("no trace reached its limit")

    with_client(server, use)


def test_max_new_tokens_zero_fills_the_cache(server):
    prompt = [13, 12, 11, 10] * 8

    async def use(client):
        await client.flush()
        first = await sample(client, prompt, None, max_new_tokens=0)
        return first, await sample(client, prompt, None)

    leader, sibling = with_client(server, use)
    assert leader.tokens == [] and len(leader.logp) == 0
    assert (leader.prompt_tokens, leader.cached_tokens) == (32, 0)
    assert (sibling.prompt_tokens, sibling.cached_tokens) == (32, 31)


def test_siblings_differ(server):
    async def use(client):
        return await asyncio.gather(*(sample(client, PROMPTS[0], None) for _ in range(8)))

    assert len({tuple(generated.tokens) for generated in with_client(server, use)}) > 4


def test_flush_empties_the_cache_and_is_refused_while_requests_are_pending(server):
    async def use(client):
        await sample(client, PROMPTS[3], None)
        assert (await sample(client, PROMPTS[3], None)).cached_tokens > 0
        await client.flush()
        assert (await sample(client, PROMPTS[3], None)).cached_tokens == 0
        refused = 0
        for _ in range(20):
            pending = asyncio.gather(*(sample(client, [9, n], None, max_new_tokens=200) for n in range(10, 26)))
            await asyncio.sleep(0.05)
            try:
                await client.flush()
            except RequestRefused:
                refused += 1
            await pending
            if refused:
                break
        assert refused
        await client.flush()

    with_client(server, use)


def test_identity(server, model_folder):
    async def use(client):
        assert await client.alive(20.0)
        return await client.identity()

    identity = with_client(server, use)
    assert identity.model_path == str(model_folder)
    assert (identity.dtype, identity.vocabulary, identity.tensor_parallel) == ("float32", 50, 1)
    assert identity.max_context >= 256 and identity.cache_tokens >= 8192
    assert identity.lora and identity.max_lora_rank == 8 and not identity.deterministic
