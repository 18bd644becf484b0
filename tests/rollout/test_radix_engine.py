"""The embedded engine: log-probs, random streams, ends, refused requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.rollout.engine import PromptTooLong, Request, generate
from spiral_fast.rollout.radix.sampling import uniforms
from spiral_fast.trace import TraceKey
from tests.rollout.tiny_models import (
    FAMILIES,
    VOCABULARY,
    check_counts,
    make_engine,
    plain_logits,
    plain_logp,
    request,
    tiny_model,
    tree_requests,
)


@pytest.fixture(scope="module")
def exact_model():
    """float64: batching cannot change a token."""
    return tiny_model(dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family,kv_heads", [(family, 2) for family in FAMILIES] + [("llama", 4), ("qwen3", 1)])
def test_logp_is_the_models_own(family, kv_heads, temperature):
    model = tiny_model(family, kv_heads=kv_heads)
    requests = tree_requests(temperature=temperature)
    for each, done in zip(requests, generate(make_engine(model), requests), strict=True):
        assert done.logp.dtype == np.float32
        np.testing.assert_allclose(done.logp, plain_logp(model, each, done.tokens), rtol=0, atol=1e-5)


def test_logp_in_float64(exact_model):
    """Down to what the model itself rounds to float32 (norms, rotary angles)."""
    requests = tree_requests(temperature=0.7)
    for each, done in zip(requests, generate(make_engine(exact_model), requests), strict=True):
        np.testing.assert_allclose(done.logp, plain_logp(exact_model, each, done.tokens), rtol=0, atol=1e-6)


def test_no_adapter_needed():
    model = tiny_model().unload()
    done = generate(make_engine(model), [request([2, 3, 4])])[0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[2, 3, 4, *done.tokens]]), use_cache=False).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(done.logp, expected.numpy(), rtol=0, atol=1e-5)


def test_a_trace_does_not_depend_on_its_company(exact_model):
    requests = tree_requests(siblings=2)
    together = generate(make_engine(exact_model), requests)
    for changes in ({"max_running": 3}, {"prefill_chunk": 5}, {"max_running": 1}):
        for done, other in zip(together, generate(make_engine(exact_model, **changes), requests), strict=True):
            assert done.tokens == other.tokens
    for each, done in list(zip(requests, together, strict=True))[::5]:
        assert generate(make_engine(exact_model), [each])[0].tokens == done.tokens


def test_in_float32_only_a_tie_of_rounding_lets_company_change_a_trace():
    """Log-probs agree to rounding up to the first other token; its random number lies at the edge between the two."""
    model = tiny_model()
    requests = [request([2 + i % 3, 5], seed=i, max_new_tokens=20) for i in range(24)]
    together = generate(make_engine(model, eos=()), requests)
    for changes in ({"max_running": 5}, {"max_running": 11, "cache_tokens": 100}):
        for each, one, two in zip(
            requests, together, generate(make_engine(model, eos=(), **changes), requests), strict=True
        ):
            same = next((i for i, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=True)) if a != b), 20)
            np.testing.assert_allclose(one.logp[:same], two.logp[:same], rtol=0, atol=1e-5)
            if same < 20:
                logits = plain_logits(model, [*each.prompt, *one.tokens[:same]])[-1].double()
                edge = logits.softmax(-1).cumsum(-1)[min(one.tokens[same], two.tokens[same])]
                u = uniforms(np.array([each.seed], np.uint64), np.array([same], np.uint64))[0]
                assert abs(float(edge) - u) < 1e-5


def test_siblings_differ_and_seeds_repeat(exact_model):
    prompt = [2, 3, 4, 5]
    first, second = (
        generate(make_engine(exact_model, eos=()), [request(prompt, seed=s) for s in (1, 2, 1)]) for _ in range(2)
    )
    assert first[0].tokens == first[2].tokens != first[1].tokens
    assert [done.tokens for done in first] == [done.tokens for done in second]


def test_same_calls_give_the_same_bits():
    model = tiny_model()
    runs = [generate(make_engine(model, max_running=7), tree_requests()) for _ in range(2)]
    for one, two in zip(*runs, strict=True):
        assert one.tokens == two.tokens and np.array_equal(one.logp, two.logp)


def test_a_cold_temperature_is_greedy(exact_model):
    prompt = [2, 9, 4]
    tokens = generate(make_engine(exact_model, eos=()), [request(prompt, temperature=1e-5)])[0].tokens
    for n in range(len(tokens)):
        assert tokens[n] == int(plain_logits(exact_model, prompt + tokens[:n])[-1].argmax())


def test_sampled_frequencies_match_the_model():
    """Second tokens: sampled in a decode step, after a first one that all siblings share."""
    model = tiny_model(seed=3)
    n = 5000
    engine = make_engine(model, eos=(), max_running=2500, cache_tokens=20000)
    prompt = [5, 6, 7]
    pairs = np.array(
        [d.tokens for d in generate(engine, [request(prompt, seed=s, max_new_tokens=2) for s in range(n)])]
    )
    first = int(np.bincount(pairs[:, 0]).argmax())
    for context, drawn in ((prompt, pairs[:, 0]), ([*prompt, first], pairs[pairs[:, 0] == first, 1])):
        probability = plain_logits(model, context)[-1].double().softmax(-1).numpy()
        order = np.argsort(-probability)[:9]
        expected = np.append(probability[order], 1 - probability[order].sum()) * len(drawn)
        counts = np.bincount(drawn, minlength=VOCABULARY)[order]
        counts = np.append(counts, len(drawn) - counts.sum())
        assert len(drawn) > 200 and ((counts - expected) ** 2 / expected).sum() < 27.9  # 99.9 %, 9 degrees of freedom


def test_any_of_several_ends():
    model = tiny_model()
    requests = [request([7, 8], seed=s, max_new_tokens=60) for s in range(40)]
    ends = {1, 4, 50}
    seen = set()
    for done in generate(make_engine(model, eos=ends), requests):
        inside = set(done.tokens[:-1]) & ends
        assert not inside
        assert done.finish_reason == ("stop" if done.tokens[-1] in ends else "length")
        assert done.finish_reason == "stop" or len(done.tokens) == 60
        seen.add(done.tokens[-1])
    assert ends <= seen


def test_length(exact_model):
    for n in (1, 2, 33, 70):
        done = generate(make_engine(exact_model, eos=()), [request([2, 3], max_new_tokens=n)])[0]
        assert (len(done.tokens), len(done.logp), done.finish_reason) == (n, n, "length")


def test_an_end_in_the_last_place_is_a_stop(exact_model):
    tokens = generate(make_engine(exact_model, eos=()), [request([2, 3], max_new_tokens=5)])[0].tokens
    assert len(set(tokens[:4]) & {tokens[4]}) == 0
    done = generate(make_engine(exact_model, eos={tokens[4]}), [request([2, 3], max_new_tokens=5)])[0]
    assert (done.tokens, done.finish_reason) == (tokens, "stop")


def test_too_long_names_problem_set_and_lengths(exact_model):
    engine = make_engine(exact_model, max_context=100)
    with pytest.raises(PromptTooLong, match="problem 'x7', set 2: a prompt of 90 tokens.*11 exceeds.*100"):
        engine.add(Request(TraceKey("x7", 1, 2, 0), (2,) * 90, 11, 1.0, 0))
    engine.add(Request(TraceKey("x7", 1, 2, 0), (2,) * 90, 10, 1.0, 0))


@pytest.mark.parametrize(
    "bad,words",
    [
        (request([2] * 50, max_new_tokens=60), "never fits into rollout.cache_tokens = 100"),
        (request([]), "needs a prompt"),
        (request([2], max_new_tokens=0), "max_new_tokens >= 1"),
        (request([2], temperature=0.0), "temperature > 0"),
        (request([2, VOCABULARY]), "prompt ids must be in 0..59"),
        (request([-1]), "prompt ids must be in 0..59"),
    ],
)
def test_requests_that_can_never_run(exact_model, bad, words):
    with pytest.raises(ValueError, match=words):
        make_engine(exact_model, cache_tokens=100).add(bad)


def test_abandoned_requests_leave_an_engine_like_new(exact_model):
    """One request done, others running, others queued; then the same requests again, and again the same bits."""
    requests = tree_requests(siblings=2)
    fresh = make_engine(exact_model, max_running=5)
    expected = generate(fresh, requests)
    engine = make_engine(exact_model, max_running=5, cache_tokens=20000)
    tickets = [engine.add(request) for request in requests]
    finished = engine.step()
    assert 0 < len(finished) < len(tickets)
    before = engine.counts
    engine.abandon()
    assert engine.step() == []
    lost = engine.counts - before
    assert (lost.prompt, lost.cached, lost.computed) == (0, 0, 0) and lost.generated > 0  # of the running ones
    assert engine.counts.prompt == engine.counts.cached + engine.counts.computed
    before = engine.counts
    again = generate(engine, requests)
    check_counts(engine, requests, again, before)
    for one, two in zip(expected, again, strict=True):
        assert one.tokens == two.tokens and np.array_equal(one.logp, two.logp)
        assert one.computed_tokens == two.computed_tokens  # nothing of before was read


def test_abandon_gives_back_every_token_of_the_cache(exact_model):
    """A cache that holds one request at a time: one that kept its place would keep the next from running for ever."""
    engine = make_engine(exact_model, eos=(), cache_tokens=40)
    for round in range(5):
        for i in range(3):
            engine.add(request([2, 3, 4 + round] * 10, max_new_tokens=10, seed=i))
        engine.abandon()  # queued
        engine.add(request([7, 8, 9 + round] * 10, max_new_tokens=10))
        engine.add(request([2], max_new_tokens=1))
        engine.step()
        engine.abandon()  # and running
    done = generate(engine, [request([5, 6] * 15, max_new_tokens=10)])[0]
    assert (len(done.tokens), done.cached_tokens) == (10, 0)
    assert engine._pool._top <= 1 + 40


def test_abandon_allows_the_next_policy_and_an_idle_engine(exact_model):
    engine = make_engine(exact_model, eos=())
    engine.abandon()
    engine.add(request([2, 3]))
    engine.abandon()
    engine.set_policy(3)
    assert generate(engine, [request([2, 3])])[0].policy_version == 3
