"""The engine on a real SGLang server: the contract, prefills, versions, and what may go wrong short of a death."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import Completion, EngineFailed, PromptTooLong, Request, generate
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.rollout.sglang.connection import ByUrl
from spiral_fast.rollout.sglang.engine import SglangEngine
from spiral_fast.rollout.sglang.server import ServerProcess
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, TraceKey
from tests.rollout.tiny_models import trie_tokens
from tests.sglang.tiny_server import draw_adapter, load, make_config

VOCABULARY = 50


@pytest.fixture(scope="module")
def loaded(model_folder) -> LoadedModel:
    return load(make_config(model_folder))


def make_engine(loaded: LoadedModel, servers: Sequence[ServerProcess], **changes) -> SglangEngine:
    settings = dict(temperature=1.0, max_running=32, timeout_s=20.0, start_timeout_s=60.0) | changes
    return SglangEngine(
        lambda folder: [ByUrl(server.url, server.api_key, 20.0, folder) for server in servers],
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


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_learner_and_of_the_embedded_engine(engine, loaded, temperature):
    compare_log_probs(engine, loaded, temperature)


def compare_log_probs(engine: SglangEngine, loaded: LoadedModel, temperature: float) -> None:
    """Of tokens that `engine`, which has the policy of `loaded`, samples."""
    requests = [
        request(prompt, problem=f"p{p}", index=i, temperature=temperature)
        for p, prompt in enumerate(random_prompts(0, 6))
        for i in range(4)
    ]
    found = generate(engine, requests)
    assert max(gaps(loaded, requests, found)) <= 1e-4
    assert all(len(done.logp) == len(done.tokens) > 0 for done in found)
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
    assert {done.policy_version for done in found} == {0}


# Versions


def _directly(engine, server):
    engine.set_policy(1)


def _after_a_flush(engine, server):
    engine.set_policy(0)
    engine.set_policy(1)


def _flushed_again(engine, server):
    engine.set_policy(1)
    engine.set_policy(1)


def _after_requests_were_abandoned(engine, server):
    for i in range(8):
        engine.add(request([9, 9, 9, 9], index=i, max_new_tokens=100))
    engine.step()
    engine.abandon()
    engine.set_policy(1)


def _by_way_of_another_version(engine, server):
    engine.set_policy(7)
    generate(engine, [request([5, 6, 7])])
    engine.set_policy(1)


@pytest.mark.parametrize(
    "path",
    [_directly, _after_a_flush, _flushed_again, _after_requests_were_abandoned, _by_way_of_another_version],
)
def test_the_first_request_after_an_update_is_cold_and_new(engine, server, loaded, path):
    requests = [request(prompt, problem=f"p{p}") for p, prompt in enumerate(random_prompts(1, 3))]
    old = generate(
        engine, [dataclasses.replace(one, key=one.key._replace(index=i)) for one in requests for i in (0, 1)]
    )
    assert sum(done.cached_tokens for done in old) > 0
    draw_adapter(loaded, 2)
    assert min(gaps(loaded, [one for one in requests for _ in (0, 1)], old)) > 1e-2  # another policy altogether
    path(engine, server)
    lone = generate(engine, requests[:1])
    assert lone[0].cached_tokens == 0 and lone[0].policy_version == 1
    found = lone + generate(engine, requests)
    assert max(gaps(loaded, requests[:1] + requests, found)) <= 1e-4


def test_old_names_are_unloaded_and_the_last_one_at_the_end(server, loaded):
    before = adapters_on(server)
    engine = make_engine(loaded, [server])
    seen = set()
    for version in range(4):
        draw_adapter(loaded, version)
        engine.set_policy(version)
        (name,) = adapters_on(server) - before
        seen.add(name)
    assert len(seen) == 4
    engine.close()
    engine.close()
    assert adapters_on(server) == before


def test_two_engines_on_one_server_keep_their_policies_apart(engine, server, loaded):
    engine.set_policy(0)
    other = make_engine(loaded, [server])
    draw_adapter(loaded, 5)
    other.set_policy(0)
    asked = [request(random_prompts(2, 1)[0], index=i) for i in range(3)]
    theirs, ours = generate(other, asked), generate(engine, asked)
    assert max(gaps(loaded, asked, theirs)) <= 1e-4 and min(gaps(loaded, asked, ours)) > 1e-2
    other.close()
    draw_adapter(loaded, 1)
    assert max(gaps(loaded, asked, generate(engine, asked))) <= 1e-4


def test_no_update_while_requests_are_pending(engine):
    engine.add(request([5, 6, 7], max_new_tokens=30))
    engine.set_policy(0)  # the first one may come after `add`
    with pytest.raises(RuntimeError, match=r"set_policy\(1\) with 1 requests queued or running; finish them first"):
        engine.set_policy(1)
    assert len(engine.step()) == 1 and engine.step() == []
    engine.set_policy(1)


def test_an_adapter_that_is_no_number_stops_the_run(engine, loaded):
    engine.set_policy(0)
    with torch.no_grad():
        next(p for name, p in loaded.model.named_parameters() if "lora_B" in name)[0, 0] = float("nan")
    with pytest.raises(EngineFailed, match="SGLang server http://127.0.0.1.* at the learner"):
        engine.set_policy(1)
    draw_adapter(loaded, 1)
    engine.set_policy(1)
    assert generate(engine, [request([5, 6])])[0].policy_version == 1


# Prefills


class TreePrompts:
    """A template, the problem, candidates: all token ids."""

    def search(self, problem: Problem) -> list[int]:
        return [4, 5, 6, *problem.data["ids"], 7]

    def aggregation(self, problem: Problem, candidates: list[list[int]]) -> list[int]:
        quoted = [token for candidate in candidates for token in [8, *candidate[:16]]]
        return [4, 5, 6, *problem.data["ids"], 9, *quoted, 7]

    def decode(self, tokens: list[int]) -> str:
        return ""


PROBLEMS = [Problem(f"p{i}", "", "", {"ids": ids}) for i, ids in enumerate(random_prompts(3, 8, length=12))]


def ideal_hits(requests: Sequence[Sequence[int]]) -> int:
    """Of these prompts and a leader for each distinct one: all but each request's last token, and of the leaders all
    but the distinct prefixes."""
    distinct = set(map(tuple, requests))
    return sum(len(prompt) - 1 for prompt in requests) + sum(map(len, distinct)) - trie_tokens(distinct)


@pytest.mark.parametrize(("order", "max_running"), [("uniform", 6), ("balanced shared_first", 64)])
def test_two_stages_are_prefilled_once(server, loaded, model_folder, order, max_running):
    sampler, _, member_order = order.partition(" ")
    shape = {"n_search": 8, "n_sets": 4, "set_size": 4, "n_aggregations": 4, "set_sampler": sampler}
    limits = {"search_max_new_tokens": 16, "aggregation_max_new_tokens": 12}
    config = make_config(model_folder, rollout=shape | limits | {"member_order": member_order or "index"})
    engine = make_engine(loaded, [server], max_running=max_running)
    try:
        done: list[TraceKey] = []
        drawn = list(enumerate(PROBLEMS))
        found = roll_out(engine, TreePrompts(), drawn, config, on_trace=lambda _, trace: done.append(trace.key))
    finally:
        engine.close()
    prompts = [trace.prompt for rollout in found for trace in rollout.traces()]
    counts, ideal = engine.counts, ideal_hits(prompts)
    assert counts.prompt == sum(map(len, prompts)) and counts.cached + counts.computed == counts.prompt
    assert counts.leaders == sum(map(len, set(map(tuple, prompts))))
    assert counts.cacheable == ideal
    assert counts.hits >= 0.99 * ideal
    assert counts.computed == counts.prompt + counts.leaders - counts.hits
    if max_running == 6:  # early problems aggregate while later ones search
        first = [i for i, key in enumerate(done) if key.problem == "p0" and key.level == AGGREGATION]
        last = [i for i, key in enumerate(done) if key.problem == "p7" and key.level == SEARCH]
        assert first[-1] < last[0]


@pytest.mark.parametrize("siblings", [1, 3])
def test_interleaved_problems_and_lone_requests_are_prefilled_once(engine, siblings):
    """One trace per set, as recursive self-aggregation has them, and sets of all problems in any order."""
    rng = np.random.default_rng(4)
    prompts = []
    for problem in PROBLEMS:
        traces = rng.integers(10, VOCABULARY, (6, 14)).tolist()
        for s in range(6):
            members = sorted(rng.choice(6, 3, replace=False))
            prompts.append((problem.id, s, TreePrompts().aggregation(problem, [traces[i] for i in members])))
    requests = [
        request(prompt, problem=problem, set=s, level=1, index=i, max_new_tokens=6)
        for problem, s, prompt in prompts
        for i in range(siblings)
    ]
    rng.shuffle(requests)
    generate(engine, requests)
    counts, plain = engine.counts, [one.prompt for one in requests]
    assert counts.hits >= 0.99 * counts.cacheable
    if siblings > 1:
        assert counts.cacheable == ideal_hits(plain)
    else:  # who shares with nobody else that waits needs no leader
        distinct = trie_tokens(plain)
        assert counts.computed <= 1.01 * (distinct + len(plain)) and counts.leaders < sum(map(len, plain))


def test_a_lone_request_has_no_leader(engine):
    done = generate(engine, [request([5, 6, 7, 8])])[0]
    assert (done.cached_tokens, done.computed_tokens) == (0, 4)
    assert engine.counts.leaders == 0 and engine.counts.computed == 4
    generate(engine, [request([5, 6, 7, 8, 9, 10])])
    assert engine.counts.computed == 6 and engine.counts.hits == 4 == engine.counts.cacheable


# Refusals, abandoned requests, interrupts


@pytest.mark.parametrize(
    ("length", "new", "words"),
    [(300, 10, "longer than the model's context length"), (150, 150, "exceeds"), (259, 4, "exceeds|stopped after")],
)
def test_a_prompt_that_does_not_fit(engine, length, new, words):
    long = request([5 + i % 30 for i in range(length)], problem="long", set=3, max_new_tokens=new)
    with pytest.raises(PromptTooLong, match=f"'long', set 3: .* of {length} tokens \\+ max_new_tokens {new} .* 256 t"):
        engine.add(long)
    engine.set_policy(0)
    engine.max_context = 10_000  # so that only the server can know
    for i in range(4):
        engine.add(request([5, 6, 7], index=i, max_new_tokens=100))
    with pytest.raises(PromptTooLong, match=f"problem 'long', set 3: .* the server can take .*{words}"):
        engine.add(long)
        while engine.step():
            pass
    assert engine.step() == []  # nothing is pending
    engine.set_policy(0)
    assert len(generate(engine, [request([5, 6])])) == 1


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([], {}, "needs a prompt"),
        ([3, 50], {}, r"in 0\.\.49, found 3\.\.50"),
        ([3], {"temperature": 0.0}, "temperature > 0"),
    ],
)
def test_a_request_that_can_never_run(engine, prompt, changes, words):
    with pytest.raises(ValueError, match=f"problem 'p'.*{words}"):
        engine.add(request(prompt, **changes))
    assert engine.step() == []


def test_several_end_of_sequence_ids(server, loaded):
    ends = loaded.eos_token_ids | {7, 9, 11}
    engine = make_engine(dataclasses.replace(loaded, eos_token_ids=ends), [server])
    requests = [request([5, 6, 7, i % 40], index=i, max_new_tokens=30) for i in range(40)]
    found = generate(engine, requests)
    engine.close()
    stopped = {done.tokens[-1] for done in found if done.finish_reason == "stop"}
    assert len(stopped) >= 3 and stopped <= ends
    for done in found:
        assert (done.finish_reason == "stop") == (done.tokens[-1] in ends) and not ends & set(done.tokens[:-1])
        assert done.finish_reason == "stop" or len(done.tokens) == 30


class Stranger:
    """Somebody else's requests, one after another, for as long as the block lasts."""

    def __init__(self, server: ServerProcess, new_tokens: int):
        self.body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True}}
        self.server, self.over = server, threading.Event()
        self.answers: list[dict] = []

    def _run(self) -> None:
        while not self.over.is_set():
            self.answers.append(ask(self.server, "/generate", self.body))

    def __enter__(self) -> Stranger:
        self.pool = ThreadPoolExecutor(2)
        self.runs: list[Future] = []
        for _ in range(2):  # one after the other, so that they do not end together
            self.runs.append(self.pool.submit(self._run))
            time.sleep(0.3)
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.pool.shutdown()
        for run in self.runs:
            run.result()


def test_what_is_abandoned_ends_on_the_server(engine, server):
    engine.set_policy(0)
    for i in range(16):
        engine.add(request([5, 6, 7], index=i, max_new_tokens=200))
    engine.step()
    client = engine._fleet.servers[0].client
    client._unanswered.add("known-to-us")  # one whose end can be seen, as if the client had sent it
    pool = ThreadPoolExecutor(1)
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 240, "ignore_eos": True}}
    with Stranger(server, 40) as stranger:
        ours = pool.submit(ask, server, "/generate", body | {"rid": "known-to-us"})
        while not stranger.answers:  # all run, ours for long
            time.sleep(0.05)
        engine.abandon()
        stranger.over.set()
    assert not client._unanswered
    assert ours.result()["meta_info"]["finish_reason"]["type"] == "abort"  # the server was told
    ends = {answer["meta_info"]["finish_reason"]["type"] for answer in stranger.answers}
    assert ends == {"length"}  # other people's requests go on
    engine.set_policy(0)
    assert engine.step() == []
    assert generate(engine, [request([5, 6, 7])])[0].cached_tokens == 0


def test_a_cache_in_use_is_emptied_once_it_can_be(engine, server):
    engine.set_policy(0)
    future = ThreadPoolExecutor(1).submit(
        ask, server, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    )
    engine.set_policy(0)
    assert future.result()["meta_info"]["finish_reason"]["type"] == "length"  # it was waited for, not ended


def test_a_cache_that_stays_in_use_is_no_empty_one(server, loaded):
    engine = make_engine(loaded, [server], timeout_s=1.0)
    engine.set_policy(0)
    with Stranger(server, 230), pytest.raises(EngineFailed, match="to flush its cache.*does another run use"):
        engine.set_policy(0)
    engine.set_policy(0)
    engine.close()


def test_ctrl_c_while_the_servers_work(engine):
    engine.set_policy(0)
    for i in range(32):
        engine.add(request([5, 6, 7], index=i, max_new_tokens=240))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while engine.step():
            pass
        threading.Event().wait()  # a fast machine
    assert engine.step() == []


def test_nothing_is_left_after_close(server, loaded):
    threads = {thread.name for thread in threading.enumerate()}
    engine = make_engine(loaded, [server])
    generate(engine, [request([5, 6])])
    assert any(thread.name == "sglang" for thread in threading.enumerate())
    engine.add(request([5, 6, 7], max_new_tokens=200))
    engine.close()
    assert engine.step() == []
    assert {thread.name for thread in threading.enumerate()} <= threads


def test_a_server_that_is_not_there(loaded, server):
    class Nobody:
        url, api_key = "http://127.0.0.1:1", None

    engine = make_engine(loaded, [server, Nobody], start_timeout_s=5.0, timeout_s=5.0)
    with pytest.raises(EngineFailed, match="http://127.0.0.1:1 does not generate within .*start_timeout_s"):
        engine.set_policy(0)
    engine.close()


def test_a_wrong_key(loaded, server):
    class Locked:
        url, api_key = server.url, "wrong"

    engine = make_engine(loaded, [Locked])
    with pytest.raises(EngineFailed, match="SPIRAL_FAST_SERVER_KEY"):
        engine.set_policy(0)
    engine.close()
