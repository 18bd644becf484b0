"""Leaders against a naive trie, with prefills that end in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_fast.rollout.sglang.leaders import ID_BYTES, Leaders, Prefixes, encode, shared
from tests.rollout.tiny_models import trie_tokens

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def naive_shared(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(st.integers(0, 300), max_size=6), st.lists(st.integers(0, 300), max_size=6))
def test_encoded_prompts_sort_and_share_as_lists_do(a, b):
    assert (encode(a) < encode(b)) == (a < b)
    assert shared(encode(a), encode(b)) == naive_shared(a, b)


@given(prompts, st.lists(st.integers(0, 2), min_size=1, max_size=7), st.data())
def test_nearest_is_the_best_of_all(known, asked, data):
    prefixes = Prefixes()
    for prompt in known:
        prefixes.add(encode(prompt))
    for prompt in data.draw(st.lists(st.sampled_from(known), unique_by=id, max_size=len(known) - 1)):
        prefixes.remove(encode(prompt))
        known = [other for other in known if other is not prompt]
    best = max(naive_shared(asked, other) for other in known)
    tokens, other = prefixes.nearest(encode(asked))
    assert tokens == best and len(prefixes) == len(known)
    assert (other is None) == (best == 0)
    assert other is None or naive_shared(asked, [int(i) for i in other[ID_BYTES - 1 :: ID_BYTES]]) == best


def prefill(asked: list[list[int]], seed: int) -> tuple[int, int]:
    """(tokens computed, most prefills in flight at a time) when each begins as soon as it may and ends at random."""
    leaders, chance = Leaders(), random.Random(seed)
    waiting, flying = [encode(prompt) for prompt in asked], []
    computed = most = 0
    while waiting or flying:
        for prompt in list(waiting):
            if leaders.waits_for(prompt) is None:
                waiting.remove(prompt)
                flying.append(prompt)
                computed += len(prompt) // ID_BYTES - leaders.there(prompt)
                leaders.start(prompt)
            else:
                assert leaders.waits_for(prompt) in flying  # so that nothing waits for ever
        most = max(most, len(flying))
        done = flying.pop(chance.randrange(len(flying)))
        leaders.finish(done)
    return computed, most


@given(prompts, st.integers(0, 99))
def test_nothing_shared_is_computed_twice(asked, seed):
    """Of each prompt at least the last token is computed; all other prefixes once."""
    computed, _ = prefill(asked, seed)
    ended = trie_tokens(asked)
    repeats = computed - ended  # prompts that another one had prefilled to the end: one token each
    assert (
        0
        <= repeats
        <= sum(any(i != j and naive_shared(a, b) == len(a) for j, b in enumerate(asked)) for i, a in enumerate(asked))
    )
    if not any(naive_shared(a, b) == len(a) for i, a in enumerate(asked) for j, b in enumerate(asked) if i != j):
        assert computed == ended


@pytest.mark.parametrize("seed", range(3))
def test_what_shares_nothing_waits_for_nothing(seed):
    assert prefill([[7, i, 1] for i in range(20)], seed)[1] >= 19  # one waits for the head of all, then all go
    assert prefill([[i, 1] for i in range(20)], seed) == (40, 20)


def test_a_prompt_waits_only_for_the_one_it_shares_most_with():
    leaders = Leaders()
    for prompt in ([1, 2, 3], [1, 2, 4, 4]):
        leaders.start(encode(prompt))
    assert leaders.waits_for(encode([1, 2, 4, 4, 5])) == encode([1, 2, 4, 4])
    leaders.finish(encode([1, 2, 4, 4]))
    assert leaders.waits_for(encode([1, 2, 4, 4, 5])) is None
    assert leaders.there(encode([1, 2, 4, 4, 5])) == 4
    assert leaders.there(encode([1, 2, 4, 4])) == 3  # a server computes the last token again
    assert leaders.waits_for(encode([9])) is None
