"""The embedded engine: what is computed, what is cached, budget and faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.rollout.engine import NonFiniteLogits, Request, generate
from spiral_fast.trace import TraceKey
from tests.rollout.tiny_models import (
    VOCABULARY,
    check_counts,
    make_engine,
    plain_logp,
    request,
    tiny_model,
    tree_prompts,
    tree_requests,
    trie_tokens,
)


@pytest.fixture(scope="module")
def exact_model():
    """float64: batching cannot change a token."""
    return tiny_model(dtype=torch.float64)


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


@pytest.mark.parametrize("chunk", [2, 64])
def test_prompts_that_end_inside_a_later_run_of_one_prefill(exact_model, chunk):
    """The first run continues a cached prompt; the others end inside the second, in an earlier chunk than its end."""
    engine = make_engine(exact_model, prefill_chunk=chunk)
    generate(engine, [request([2, 3, 4])])
    prompts = [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [10, 11, 12], [10]]
    requests = [request(prompt, seed=i) for i, prompt in enumerate(prompts)]
    completions = generate(engine, requests)
    assert [done.computed_tokens for done in completions] == [2, 5, 0, 0]
    for each, done in zip(requests, completions, strict=True):
        np.testing.assert_allclose(done.logp, plain_logp(exact_model, each, done.tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cache_tokens", [100, 200, 20000])
@pytest.mark.parametrize("dtype,error", [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_what_is_counted_is_what_runs_and_log_probs_hold_after_evictions(cache_tokens, dtype, error):
    """Twice the same requests, in another order; in float64 by the torch attention, in float32 by the native one."""
    model = tiny_model(dtype=dtype)
    ran = []  # tokens of each forward
    hook = (
        model.get_base_model()
        .get_input_embeddings()
        .register_forward_hook(lambda module, tokens, out: ran.append(tokens[0].numel()))
    )
    requests = tree_requests(siblings=2)
    requests += [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]
    engine = make_engine(model, cache_tokens=cache_tokens, prefill_chunk=16)
    completions = generate(engine, requests)
    hook.remove()
    check_counts(engine, requests, completions)
    # a request's first token comes from its prompt's last hidden state, each later one from a forward of one token
    assert sum(ran) == engine.counts.computed + engine.counts.generated - len(requests)
    assert engine._pool.held == engine._tree.size <= cache_tokens
    if cache_tokens == 20000:
        assert engine.counts.computed == trie_tokens(each.prompt for each in requests)
    for each, done in zip(requests, completions, strict=True):
        np.testing.assert_allclose(done.logp, plain_logp(model, each, done.tokens), rtol=0, atol=error)


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
        running.append(engine._n_running)
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


@pytest.mark.parametrize("forward", [1, 4, 30])
def test_an_interrupt_gives_every_token_back(forward):
    """In the first prefill, a later chunk, after evictions; native decode. The engine is like a new one then."""
    model = tiny_model()
    settings = dict(eos=(), max_running=5, cache_tokens=200, prefill_chunk=16)
    engine = make_engine(model, **settings)
    requests = tree_requests(siblings=2)
    seen = iter(range(1, 10**6))

    def interrupt(*_):
        if next(seen) == forward:
            raise KeyboardInterrupt

    hook = model.get_base_model().model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, requests)
    hook.remove()
    assert engine._pool.held == engine._tree.size == engine._reserved == 0 and engine.step() == []
    assert engine.counts.prompt == engine.counts.cached + engine.counts.computed
    before = engine.counts
    again = generate(engine, requests)
    check_counts(engine, requests, again, before)
    for one, two in zip(generate(make_engine(model, **settings), requests), again, strict=True):
        assert one.tokens == two.tokens and np.array_equal(one.logp, two.logp)
        assert one.computed_tokens == two.computed_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_budget_of_exactly_one_request(dtype):
    """Prompts that fill it, of one token, prefixes of the cached one; one new token; ends at once."""
    engine = make_engine(tiny_model(dtype=dtype), eos=(), cache_tokens=30)
    sizes = [(29, 1), (28, 2), (28, 1), (10, 20), (1, 29), (29, 1), (15, 15), (16, 14)]
    requests = [request([2] * n, max_new_tokens=new) for n, new in sizes]
    completions = generate(engine, requests)
    assert [len(done.tokens) for done in completions] == [new for _, new in sizes]
    check_counts(engine, requests, completions)
    assert engine._pool.held == engine._tree.size <= 30 and engine._reserved == 0
    engine = make_engine(tiny_model(dtype=dtype), eos=range(VOCABULARY), cache_tokens=30)
    assert {(len(done.tokens), done.finish_reason) for done in generate(engine, requests)} == {(1, "stop")}
    assert engine._pool.held == engine._tree.size <= 30 and engine._reserved == 0


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
    ) as error:
        engine.step()
    assert engine.step() == [] and error.value.problems == ["p"]


def test_every_problem_with_such_logits_is_listed_once():
    model = tiny_model()
    with torch.no_grad():
        model.get_base_model().model.norm.weight.fill_(torch.nan)
    engine = make_engine(model)
    for problem in "abab":
        engine.add(Request(TraceKey(problem, 0, -1, 0), (2, 3), 12, 1.0, seed=1))
    with pytest.raises(NonFiniteLogits, match="problem 'a' and 1 more: ") as error:
        engine.step()
    assert error.value.problems == ["a", "b"]


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
    with pytest.raises(NonFiniteLogits, match=f"problem {'abc'[bad]!r}: ") as error:
        while engine.step():
            pass
    assert error.value.problems == ["abc"[bad]]
