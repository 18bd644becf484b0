"""Batches of traces to build prefix trees from: SPIRAL's, and those that are hard on a builder."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

N_SEARCH, N_SETS, SET_SIZE, N_AGGREGATIONS = 8, 4, 4, 4  # the paper's shape
PROMPT, QUOTE = 256, 8  # tokens of a problem's prompt, and of the label before each quoted candidate
SHORTEST, LONGEST = 512, 4096  # sampled tokens of a trace, uniform
VOCABULARY = 151_936


class Batch(NamedTuple):
    """What PrefixTree.build takes."""

    tokens: np.ndarray  # (N,) int64
    offsets: np.ndarray  # (n + 1,) int64
    sampled: np.ndarray  # (N,) bool


def spiral(n_problems: int, seed: int = 0) -> Batch:
    """Per problem 8 search traces, 4 sets of 4 that quote them token by token, 4 aggregation traces below each."""
    rng = np.random.default_rng(seed)

    def random(n: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, n)

    traces = []  # (prompt, sampled)
    template, ends = random(16), (random(4), random(8))  # of every prompt; of a search's and of an aggregation's
    labels = [random(QUOTE) for _ in range(SET_SIZE)]
    for _ in range(n_problems):
        problem = np.concatenate([template, random(PROMPT - len(template))])
        search = [random(rng.integers(SHORTEST, LONGEST + 1)) for _ in range(N_SEARCH)]
        traces += [(np.concatenate([problem, ends[0]]), sampled) for sampled in search]
        for _ in range(N_SETS):
            members = np.sort(rng.permutation(N_SEARCH)[:SET_SIZE])
            quotes = [piece for label, i in zip(labels, members, strict=True) for piece in (label, search[i])]
            prompt = np.concatenate([problem, *quotes, ends[1]])
            traces += [(prompt, random(rng.integers(SHORTEST, LONGEST + 1))) for _ in range(N_AGGREGATIONS)]
    return batch([np.concatenate(trace) for trace in traces], [len(prompt) for prompt, _ in traces])


def batch(traces: list[np.ndarray], prompts: list[int] | None = None) -> Batch:
    """Flat form; everything after a trace's first prompts[i] tokens (default 1) is sampled."""
    lengths = np.array([len(trace) for trace in traces])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return Batch(np.concatenate(traces), offsets, position >= np.repeat(prompts or [1] * len(traces), lengths))


def hard() -> dict[str, Batch]:
    """Each about a million tokens."""
    rng = np.random.default_rng(0)
    prompt, chain = rng.integers(0, VOCABULARY, 256), rng.integers(0, VOCABULARY, 1024)
    branches = [np.append(chain[:i], [VOCABULARY, i]) for i in rng.integers(1, 1024, 2000)]
    children = [np.concatenate([prompt, rng.integers(0, VOCABULARY, 16)]) for _ in range(4000)]
    return {
        "all traces identical": batch([chain] * 1000),
        "one long chain": batch([rng.integers(0, VOCABULARY, 1_000_000)]),
        "4,000 children of one node": batch(children),
        "a branch at every token of a chain": batch(branches),
        "two token ids, 64 tokens, all different": batch(list(rng.integers(0, 2, (16_000, 64)))),
        "traces of four tokens": batch(list(rng.integers(0, VOCABULARY, (250_000, 4)))),
    }
