"""A deterministic server: a trace depends on its seed and prompt alone. SGLang has this on GPUs; the stand-in for its
kernels lets it run here, past `rollout.sglang.deterministic`, which asks for a GPU."""

from __future__ import annotations

import asyncio

from tests.sglang.test_client import with_client
from tests.sglang.tiny_server import make_config

PROMPT, COMPANY = [7, 3, 9, 2], [[n, 9, 30, 2] for n in range(6, 20)]


def test_same_seed_same_trace_whatever_else_is_in_the_batch(start_server, model_folder):
    server = start_server(
        make_config(model_folder, rollout={"sglang": {"args": {"enable_deterministic_inference": True}}})
    )

    async def use(client):
        def trace(prompt, seed):
            sampling = dict(adapter=None, max_new_tokens=12, temperature=1.0, stop_token_ids=[5])
            return client.generate(prompt, seed=seed, **sampling)

        alone = await trace(PROMPT, 2**63 - 2)
        together = await asyncio.gather(*map(trace, COMPANY, range(100, 120)), trace(PROMPT, 2**63 - 2))
        others = await asyncio.gather(*(trace(PROMPT, seed) for seed in range(8)))
        return (await client.identity()).deterministic, alone, together[-1], others

    deterministic, alone, again, others = with_client(server, use)
    assert deterministic
    assert alone.tokens == again.tokens
    assert len({tuple(other.tokens) for other in others}) == 8
