"""What each way to spend test-time compute costs per problem, in tokens.

The cost of an answer is what must be sampled to give one: a search trace for the length sweep, k of them for majority@k
and pass@k, and for t steps of recursive self-aggregation the population, t - 1 times its aggregations, and a single
trace of the last step (the paper's budget: 8 traces + 1 = 36k tokens of 4k traces for one step).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spiral_fast.config import Config
from spiral_fast.evaluate.sampling import ProblemSamples
from spiral_fast.evaluate.stage import Sample

LENGTH, MAJORITY, ORACLE = "length", "majority", "pass (oracle)"


class Cost(NamedTuple):
    """Of one problem. prompt: every request's whole prompt; computed: of it, run through the model by the engine."""

    method: str
    at: int  # the token limit, k, or the step
    generated: float
    prompt: float
    computed: float


def rsa_name(population: int, set_size: int) -> str:
    return f"RSA {population}/{set_size}"


def costs(samples: ProblemSamples, config: Config) -> Iterator[Cost]:
    settings = config.evaluate
    search = samples.search[: settings.samples]
    lengths = np.array([len(sample.tokens) for sample in search])
    prompt = search[0].prompt_tokens
    computed = np.cumsum([sample.computed_tokens for sample in search])  # siblings of one prompt compute it once
    for limit in sorted({*settings.lengths, config.rollout.search_max_new_tokens}):
        yield Cost(LENGTH, limit, np.minimum(lengths, limit).mean(), prompt, computed[0])
    for method, ks in ((MAJORITY, settings.majority_at), (ORACLE, settings.pass_at)):
        for k in sorted(ks):
            yield Cost(method, k, k * lengths.mean(), k * prompt, computed[k - 1])
    for shape, steps in zip(settings.rsa_shapes, samples.rsa, strict=True):
        before = _tokens(samples.search[: shape.population])
        for step, traces in enumerate(steps, start=1):
            here = _tokens(traces)
            yield Cost(rsa_name(shape.population, shape.set_size), step, *(before + here / len(traces)).tolist())
            before = before + here


def _tokens(samples: list[Sample]) -> np.ndarray:
    """(3,) generated, prompt and computed tokens"""
    return np.sum([(len(s.tokens), s.prompt_tokens, s.computed_tokens) for s in samples], axis=0, dtype=np.float64)
