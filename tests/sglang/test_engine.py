"""The engine on a real SGLang server: the contract, prefills, versions, and what may go wrong short of a death."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import Completion, Request, generate
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.rollout.sglang.connection import ByUrl
from spiral_fast.rollout.sglang.engine import SglangEngine
from spiral_fast.rollout.sglang.server import ServerProcess
from spiral_fast.trace import TraceKey
from tests.sglang.tiny_server import draw_adapter, load, make_config

VOCABULARY = 50


@pytest.fixture(scope="module")
def loaded(model_folder) -> LoadedModel:
    return load(make_config(model_folder))


def make_engine(loaded: LoadedModel, servers: Sequence[ServerProcess], **changes) -> SglangEngine:
    settings = dict(temperature=1.0, max_running=32, timeout_s=20.0, start_timeout_s=60.0) | changes
    return SglangEngine(
        lambda folder: [ByUrl(server.url, server.api_key, settings["timeout_s"], folder) for server in servers],
        PolicySource(loaded),
        **settings,
    )


@pytest.fixture
def engine(server, loaded) -> Iterator[SglangEngine]:
    draw_adapter(loaded, 1)
    engine = make_engine(loaded, [server])
    yield engine
    engine.close()


def request(prompt, *, problem="p", index=0, seed=0, max_new_tokens=12, temperature=1.0, level=0, set=-1) -> Request:
    key = TraceKey(problem, level, set, index)
    return Request(key, tuple(map(int, prompt)), max_new_tokens, temperature, seed)


def ask(server: ServerProcess, path: str, body: dict | None = None):
    """What the server itself answers."""
    key = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, key)) as answer:
        return json.loads(answer.read())


def adapters_on(server: ServerProcess) -> set[str]:
    return {model["id"] for model in ask(server, "/v1/models")["data"] if model.get("parent")}


def random_prompts(seed: int, n: int, length: int = 20) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, (n, length)).tolist()


def gaps(loaded: LoadedModel, requests: Sequence[Request], found: Sequence[Completion]) -> list[float]:
    """Largest |difference| to the learner's log-probs, of each."""
    source = PolicySource(loaded)
    return [
        float(np.abs(done.logp - source.log_probs(asked.prompt, done.tokens, asked.temperature)).max())
        for asked, done in zip(requests, found, strict=True)
    ]


@pytest.mark.sglang_smoke
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_learner_and_of_the_embedded_engine(engine, loaded, temperature):
    requests = [
        request(prompt, problem=f"p{p}", index=i, temperature=temperature)
        for p, prompt in enumerate(random_prompts(0, 6))
        for i in range(4)
    ]
    found = generate(engine, requests)
    assert max(gaps(loaded, requests, found)) <= 1e-4
    assert all(len(done.logp) == len(done.tokens) > 0 and done.policy_version == 0 for done in found)
    untempered = PolicySource(loaded).log_probs(requests[0].prompt, found[0].tokens, 1.0)
    assert (np.abs(untempered - found[0].logp).max() > 1e-2) == (temperature != 1)
    # The embedded engine gives each of these tokens the same log-prob as the next one after the same prefix.
    embedded = RadixEngine(
        loaded.causal_lm, range(VOCABULARY), max_context=256, max_running=64, prefill_chunk=512, cache_tokens=20000
    )
    asked, theirs = [], []
    for one, done in zip(requests, found, strict=True):
        for n, token in enumerate(done.tokens):
            for seed in range(40):
                asked.append(dataclasses.replace(one, prompt=one.prompt + tuple(done.tokens[:n]), seed=seed))
                theirs.append((token, done.logp[n]))
        if len(asked) > 4000:
            break
    same = [
        abs(mine.logp[0] - logp)
        for mine, (token, logp) in zip(generate(embedded, asked), theirs, strict=True)
        if mine.tokens[0] == token
    ]
    assert len(same) > 100 and max(same) <= 1e-4


def test_siblings_differ_and_each_is_counted(engine):
    requests = [request([5, 6, 7, 8], index=i, seed=3, max_new_tokens=8) for i in range(8)]
    found = generate(engine, requests)
    assert len({tuple(done.tokens) for done in found}) >= 7  # although their seeds are equal
    assert not engine.per_request_seed and not engine.bitwise_resume
    for done in found:
        assert (done.prompt_tokens, done.cached_tokens, done.computed_tokens) == (4, 3, 1)
    counts = engine.counts
    assert (counts.prompt, counts.computed, counts.leaders) == (32, 4 + 8, 4)
    assert counts.cached == 32 - 12 and counts.hits == counts.cacheable == 24
    assert counts.generated == sum(len(done.tokens) for done in found)
    assert counts.busiest_server == counts.prompt + counts.generated
