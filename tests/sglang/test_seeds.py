"""A deterministic server: a trace depends on its seed and prompt alone. SGLang has this on GPUs; the stand-in for its
kernels lets it run here, past `rollout.sglang.deterministic`, which asks for a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from spiral_fast.rollout.engine import EngineFailed, generate
from spiral_fast.rollout.sglang.base_model import base_model
from spiral_fast.rollout.sglang.server import ServerProcess
from tests.sglang.test_client import with_client
from tests.sglang.test_engine import gaps, make_engine, request
from tests.sglang.tiny_server import load, make_config

PROMPT, COMPANY = [7, 3, 9, 2], [[n, 9, 30, 2] for n in range(6, 20)]


@pytest.fixture(scope="module")
def seeded_server(model_folder, tmp_path_factory) -> Iterator[ServerProcess]:
    config = make_config(model_folder, rollout={"sglang": {"args": {"enable-deterministic-inference": True}}})
    process = ServerProcess(config, base_model(config.model), tmp_path_factory.mktemp("seeded") / "server.log")
    process.start()
    yield process
    process.stop()


def test_same_seed_same_trace_whatever_else_is_in_the_batch(seeded_server):
    async def use(client):
        def trace(prompt, seed):
            sampling = dict(adapter=None, max_new_tokens=12, temperature=1.0, stop_token_ids=[5])
            return client.generate(prompt, seed=seed, **sampling)

        alone = await trace(PROMPT, 2**63 - 2)
        together = await asyncio.gather(*map(trace, COMPANY, range(100, 120)), trace(PROMPT, 2**63 - 2))
        others = await asyncio.gather(*(trace(PROMPT, seed) for seed in range(8)))
        return (await client.identity()).deterministic, alone, together[-1], others

    deterministic, alone, again, others = with_client(seeded_server, use)
    assert deterministic
    assert alone.tokens == again.tokens
    assert len({tuple(other.tokens) for other in others}) == 8


def test_engine_in_deterministic_mode(seeded_server, server, model_folder):
    loaded = load(make_config(model_folder))
    engine = make_engine(loaded, [seeded_server], deterministic=True)
    assert engine.per_request_seed and not engine.bitwise_resume
    asked = [request([5, 6, 7, 8], index=i, seed=2**62 + i) for i in range(6)]
    company = [request([9, 9, n], problem="q", index=n, seed=n) for n in range(20)]
    try:
        first = generate(engine, asked)
        engine.set_policy(1)  # under another name
        again = generate(engine, company + asked[::-1])[len(company) :][::-1]
    finally:
        engine.close()
    assert [done.tokens for done in first] == [done.tokens for done in again]
    assert len({tuple(done.tokens) for done in first}) == 6
    assert max(gaps(loaded, asked, again)) <= 1e-4

    engine = make_engine(loaded, [server], deterministic=True)
    try:
        with pytest.raises(EngineFailed, match="honours no seeds.*--enable-deterministic-inference"):
            engine.set_policy(0)
    finally:
        engine.close()
