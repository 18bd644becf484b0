"""The embedded engine: log-probs, streams, counts, budget, policy versions, refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from spiral_fast.attention import ATTENTION
from spiral_fast.learner import fsdp
from spiral_fast.learner.policy import Policy
from spiral_fast.rollout.engine import NonFiniteLogits, PromptTooLong, Request, generate
from spiral_fast.trace import TraceKey
from tests.rollout.tiny_models import (
    FAMILIES,
    VOCABULARY,
    make_engine,
    plain_logits,
    plain_logp,
    redraw_lora,
    request,
    tiny_model,
    tree_prompts,
)


@pytest.fixture(scope="module")
def exact_model():
    """float64: batching cannot change a token."""
    return tiny_model(dtype=torch.float64)


def tree_requests(seed: int = 0, siblings: int = 3, **settings):
    rng = np.random.default_rng(seed)
    return [
        request(prompt, seed=100 * p + i, max_new_tokens=int(rng.integers(1, 20)), index=i, **settings)
        for p, prompt in enumerate(tree_prompts(rng))
        for i in range(siblings)
    ]


def trie_tokens(prompts) -> int:
    """Brute force: the number of distinct non-empty prefixes."""
    return len({tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)})


def check_counts(engine, requests, completions, before=None):
    for each, done in zip(requests, completions, strict=True):
        assert done.prompt_tokens == len(each.prompt) == done.cached_tokens + done.computed_tokens
    now = engine.counts - before if before else engine.counts
    assert now.prompt == sum(done.prompt_tokens for done in completions)
    assert now.cached == sum(done.cached_tokens for done in completions)
    assert now.computed == sum(done.computed_tokens for done in completions)
    assert now.generated == sum(len(done.tokens) for done in completions)


# Log-probs


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


# Streams


def test_a_trace_does_not_depend_on_its_company(exact_model):
    requests = tree_requests(siblings=2)
    together = generate(make_engine(exact_model), requests)
    for changes in ({"max_running": 3}, {"prefill_chunk": 5}, {"max_running": 1}):
        for done, other in zip(together, generate(make_engine(exact_model, **changes), requests), strict=True):
            assert done.tokens == other.tokens
    for each, done in list(zip(requests, together, strict=True))[::5]:
        assert generate(make_engine(exact_model), [each])[0].tokens == done.tokens


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


# Counts and the cache


def test_a_prefix_is_computed_once(exact_model):
    engine = make_engine(exact_model, prefill_chunk=16)
    requests = tree_requests()
    completions = generate(engine, requests)
    check_counts(engine, requests, completions)
    assert engine.counts.computed == trie_tokens(each.prompt for each in requests)
    before = engine.counts
    again = generate(engine, requests)
    check_counts(engine, requests, again, before)
    assert (engine.counts - before).computed == 0
    assert [done.tokens for done in again] == [done.tokens for done in completions]


def test_two_stage_counts(exact_model):
    """8 search traces, 4 sets of 4, 4 aggregations each: computed = the trie's unique tokens over both stages."""
    rng = np.random.default_rng(0)
    engine = make_engine(exact_model, max_running=64)
    problems = [rng.integers(2, VOCABULARY, 15).tolist() for _ in range(3)]
    requests = [
        request([*problem, 2], seed=10 * p + i, max_new_tokens=19)
        for p, problem in enumerate(problems)
        for i in range(8)
    ]
    search = generate(engine, requests)
    prompts = []
    for p, problem in enumerate(problems):
        for _ in range(4):
            members = sorted(rng.choice(8, 4, replace=False))
            prompts.append(problem + [t for i in members for t in search[8 * p + i].tokens] + [3])
    more = [request(prompt, seed=s, max_new_tokens=19) for prompt in prompts for s in range(4)]
    completions = search + generate(engine, more)
    requests += more
    check_counts(engine, requests, completions)
    assert engine.counts.computed == trie_tokens(each.prompt for each in requests)
    assert engine.counts.cached > 0.7 * engine.counts.prompt


def test_interleaved_siblings_share(exact_model):
    prompts = tree_prompts(np.random.default_rng(1))
    requests = [request(prompt, seed=i) for i in range(4) for prompt in prompts]
    engine = make_engine(exact_model, max_running=6, cache_tokens=400)
    generate(engine, requests)
    assert engine.counts.computed < sum(map(len, prompts)) + len(prompts)


def test_a_prompt_that_ends_inside_an_earlier_one(exact_model):
    long, short = [2, 3, 4, 5, 6, 7], [2, 3, 4]
    engine = make_engine(exact_model)
    cold = generate(make_engine(exact_model), [request(short, seed=9)])[0]
    generate(engine, [request(long)])
    first, second = generate(engine, [request(short, seed=9), request(short, seed=9)])
    assert (first.cached_tokens, first.computed_tokens) == (2, 1)  # its last token again: no output was kept there
    assert (second.cached_tokens, second.computed_tokens) == (3, 0)
    assert generate(engine, [request(short)])[0].computed_tokens == 0
    assert first.tokens == second.tokens == cold.tokens
    together = make_engine(exact_model)  # in one prefill the output is there anyway
    both = generate(together, [request(long), request(short, seed=9)])
    assert [done.computed_tokens for done in both] == [6, 0] and both[1].tokens == cold.tokens


@pytest.mark.parametrize("cache_tokens", [110, 200, 450])
def test_a_small_budget_changes_counts_only(exact_model, cache_tokens):
    requests = tree_requests()
    large = generate(make_engine(exact_model), requests)
    engine = make_engine(exact_model, cache_tokens=cache_tokens)
    peak = 0
    tickets = [engine.add(each) for each in requests]
    done = {}
    while len(done) < len(tickets):
        done.update(engine.step())
        peak = max(peak, engine._tree.size + engine._reserved)
        assert engine._pool._top <= cache_tokens + 1
    small = [done[ticket] for ticket in tickets]
    assert [d.tokens for d in small] == [d.tokens for d in large]
    again = generate(engine, requests)
    assert [d.tokens for d in again] == [d.tokens for d in large]
    check_counts(engine, requests * 2, small + again)
    assert engine.counts.computed > trie_tokens(each.prompt for each in requests)
    assert peak <= cache_tokens


def test_a_pinned_prompt_survives_pressure(exact_model):
    """A long trace runs on while short ones fill the budget around it."""
    engine = make_engine(exact_model, eos=(), cache_tokens=100)
    held = request([2] * 20, max_new_tokens=40)
    rng = np.random.default_rng(0)
    others = [request(rng.integers(2, VOCABULARY, 20), max_new_tokens=2) for _ in range(12)]
    completions = generate(engine, [held, *others, request([2] * 20, max_new_tokens=40)])
    assert completions[0].tokens == completions[-1].tokens
    assert completions[-1].computed_tokens == 0


def test_more_requests_than_rows(exact_model):
    requests = [request([2, 3, 4 + i % 3], seed=i, max_new_tokens=1 + i % 5) for i in range(40)]
    engine = make_engine(exact_model, max_running=16)
    running = []
    tickets = {engine.add(each): each for each in requests}
    while tickets:
        for ticket, done in engine.step():
            each = tickets.pop(ticket)
            assert len(done.tokens) == each.max_new_tokens or done.finish_reason == "stop"
        running.append(len(engine._rows))
    assert max(running) <= 16
    assert engine.step() == []


def test_a_failed_step_leaves_nothing_half_done(exact_model):
    requests = [request([2, 3, 4, 5], seed=s) for s in range(3)]
    expected = generate(make_engine(exact_model), requests)
    engine = make_engine(exact_model)

    def fail(*_):
        raise MemoryError

    for each in requests:
        engine.add(each)
    hook = exact_model.get_base_model().model.layers[1].register_forward_hook(fail)
    with pytest.raises(MemoryError):
        engine.step()
    hook.remove()
    assert engine.step() == []
    for one, two in zip(expected, generate(engine, requests), strict=True):
        assert one.tokens == two.tokens and one.computed_tokens == two.computed_tokens


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, 1e30])
def test_logits_that_are_not_finite_are_named(weight):
    """Found when the prompt is computed, by the problem; what was queued is dropped."""
    model = tiny_model()
    engine = make_engine(model)
    engine.set_policy(7)
    with torch.no_grad():
        model.get_base_model().model.norm.weight.fill_(weight).mul_(weight)
    engine.add(request([2, 3, 4]))
    with pytest.raises(
        NonFiniteLogits, match="problem 'p': .* not finite under policy version 7: .* lower learner.learning_rate"
    ):
        engine.step()
    assert engine.step() == []


def test_logits_that_are_not_finite_while_decoding():
    """One row of three overflows at its second token; the error names its problem."""
    model = tiny_model("llama")
    prompts = {name: [2, 3, 4 + i] for i, name in enumerate("abc")}
    requests = [Request(TraceKey(p, 0, -1, 0), tuple(ids), 12, 1.0, seed=1) for p, ids in prompts.items()]
    engine = make_engine(model, eos=())
    firsts = [done.tokens[0] for done in generate(engine, requests)]
    bad = next(i for i, first in enumerate(firsts) if firsts.count(first) == 1 and first not in (2, 3, 4, 5, 6))
    with torch.no_grad():
        model.get_base_model().get_input_embeddings().weight[firsts[bad]] = torch.inf
    engine.set_policy(1)
    for each in requests:
        engine.add(each)
    with pytest.raises(NonFiniteLogits, match=f"problem {'abc'[bad]!r}: "):
        while engine.step():
            pass


# Ends


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


# Refused requests


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


# Policy versions


def in_place(model):
    redraw_lora(model, 99)


def optimiser_step(model):
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(trainable, lr=0.1).step()


def load_state(model):
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items() if "lora_" in k}, strict=False)


def other_adapter(model):
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.to(torch.float64)
    model.set_adapter("other")
    redraw_lora(model, 42)


UPDATES = [in_place, optimiser_step, load_state, other_adapter]


@pytest.mark.parametrize("update", UPDATES)
def test_a_new_version_reads_no_older_keys(update):
    model = tiny_model(dtype=torch.float64)
    engine = make_engine(model)
    requests = tree_requests(siblings=1)
    old = generate(engine, requests)
    update(model)
    engine.set_policy(1)
    warm, cold = generate(engine, requests), generate(make_engine(model), requests)
    assert warm[0].cached_tokens == 0
    for each, a, b in zip(requests, warm, cold, strict=True):
        assert a.tokens == b.tokens and np.array_equal(a.logp, b.logp) and a.policy_version == 1
        assert a.cached_tokens == b.cached_tokens
        np.testing.assert_allclose(a.logp, plain_logp(model, each, a.tokens), rtol=0, atol=1e-6)
    assert any(a.tokens != b.tokens for a, b in zip(old, warm, strict=True))


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_without_set_policy_is_noticed(update):
    model = tiny_model(dtype=torch.float64)
    engine = make_engine(model, eos=())
    generate(engine, [request([2, 3])])
    update(model)
    engine.add(request([2, 3]))
    with pytest.raises(RuntimeError, match="changed under policy version 0; call set_policy"):
        engine.step()


def test_an_update_under_a_running_request_is_noticed():
    model = tiny_model()
    engine = make_engine(model, eos=())
    for n in (1, 20):
        engine.add(request([2, 3], max_new_tokens=n))
    assert len(engine.step()) == 1
    redraw_lora(model, 5)
    with pytest.raises(RuntimeError, match="set_policy"):
        engine.step()


def test_set_policy_waits_for_nobody(exact_model):
    engine = make_engine(exact_model, eos=())
    engine.add(request([2, 3], max_new_tokens=3))
    with pytest.raises(RuntimeError, match="1 requests queued or running"):
        engine.set_policy(1)
    engine.add(request([2, 3], max_new_tokens=1))
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests queued or running"):
        engine.set_policy(1)
    assert engine.step()[0][1].policy_version == 0
    engine.set_policy(1)
    assert generate(engine, [request([2, 3])])[0].policy_version == 1


# Refused models


def test_attention_implementation_is_named():
    model = tiny_model()
    model.get_base_model().set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=f"'sdpa'; call set_attn_implementation\\('{ATTENTION}'\\)"):
        make_engine(model)


def small_qwen2(**changes):
    settings = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    model = Qwen2ForCausalLM(Qwen2Config(**settings | {"num_key_value_heads": 2} | changes))
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.mark.parametrize(
    "changes,words",
    [
        (
            dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
            r"layer_types\[2\] = 'sliding_attention'",
        ),
        (
            dict(layer_types=["full_attention", "linear_attention", "full_attention", "full_attention"]),
            r"layer_types\[1\] = 'linear_attention'",
        ),
        (
            dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type = 'dynamic'",
        ),
    ],
)
def test_models_it_cannot_serve(changes, words):
    with pytest.raises(ValueError, match=words):
        make_engine(small_qwen2(**changes))


def test_dropout_is_named():
    model = small_qwen2()
    model.model.layers[1].mlp.drop = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="dropout 0.1 in 'model.layers.1.mlp.drop'"):
        make_engine(model)


def test_yarn_is_served():
    """Its frequencies are fixed by the config."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    model = tiny_model("llama", rope_parameters=rope)
    each = request(range(2, 50), max_new_tokens=8)
    done = generate(make_engine(model), [each])[0]
    np.testing.assert_allclose(done.logp, plain_logp(model, each, done.tokens), rtol=0, atol=1e-5)


def test_bfloat16_stays_near_the_plain_forward():
    model = tiny_model(dtype=torch.bfloat16)
    requests = tree_requests()
    gaps = [
        np.abs(done.logp - plain_logp(model, each, done.tokens)).mean()
        for each, done in zip(requests, generate(make_engine(model), requests), strict=True)
    ]
    assert np.mean(gaps) < 0.03


def test_under_fsdp():
    """Sharded at world size 1, whole while it samples: the same bits, again after a return to shards."""
    model = tiny_model()
    requests = tree_requests(siblings=1)
    plain = generate(make_engine(model), requests)
    policy = Policy(model)
    fsdp.shard(policy, torch.device("cpu"))
    engine = make_engine(model, watch_weights=False)
    for version in (1, 2):
        with fsdp.unsharded(policy):
            sharded = generate(engine, requests)
        for one, two in zip(plain, sharded, strict=True):
            assert one.tokens == two.tokens and np.array_equal(one.logp, two.logp)
        engine.set_policy(version)
