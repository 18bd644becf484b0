"""Trees and head shapes to attend over, and their inputs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.prefix_tree.shapes import batch
from spiral_kernels import PrefixTree, TreePlan

HEADS = {"SmolLM2": (9, 3, 64), "Qwen3": (32, 8, 128)}  # Hq, Hkv, D
N_SEARCH, N_SETS, SET_SIZE, N_AGGREGATIONS = 8, 4, 4, 4


@functools.cache
def spiral(prompt: int, shortest: int, longest: int) -> PrefixTree:
    """One problem of the paper's shape: 8 search traces, 4 sets of 4 that quote them, 4 aggregations below each."""
    rng = np.random.default_rng(0)

    def random(n: int) -> np.ndarray:
        return rng.integers(0, 150_000, n)

    problem = random(prompt)
    search = [random(rng.integers(shortest, longest + 1)) for _ in range(N_SEARCH)]
    traces = [np.concatenate([problem, trace]) for trace in search]
    for _ in range(N_SETS):
        quoted = np.concatenate([problem, *(search[i] for i in np.sort(rng.permutation(N_SEARCH)[:SET_SIZE]))])
        traces += [np.append(quoted, random(rng.integers(shortest, longest + 1))) for _ in range(N_AGGREGATIONS)]
    return PrefixTree.build(*batch(traces))


@functools.cache
def short_nodes() -> PrefixTree:
    """About 1,400 nodes of three tokens below one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, 100, 64)
    return PrefixTree.build(*batch([np.append(prompt, rng.integers(0, 2, 14)) for _ in range(700)]))


@functools.cache
def branches() -> PrefixTree:
    """A chain of 1,024 tokens with a branch of two at most of them: up to 800 nodes above one another."""
    rng = np.random.default_rng(0)
    chain = rng.integers(0, 1000, 1024)
    return PrefixTree.build(*batch([np.append(chain[:i], [5000, i]) for i in rng.integers(1, 1024, 1500)]))


TREES = {
    "SPIRAL, traces of 8..48": lambda: spiral(64, 8, 48),
    "SPIRAL, traces of 32..160": lambda: spiral(128, 32, 160),
    "SPIRAL, traces of 64..480": lambda: spiral(256, 64, 480),
    "nodes of three tokens": short_nodes,
    "a branch at every token": branches,
}


class Case(NamedTuple):
    tree: PrefixTree
    plan: TreePlan
    q: Tensor  # (T, Hq, D), wants a gradient; so k, v (T, Hkv, D)
    k: Tensor
    v: Tensor
    d_out: Tensor  # (T, Hq, D)
    sees: Tensor  # (T, T) bool

    @property
    def dense_over_visited(self) -> float:
        return self.tree.computed_tokens**2 / self.tree.attention_area

    @property
    def forward_flops(self) -> int:
        """Of the two products, on the visited area; the backward has five."""
        return 4 * self.q.shape[1] * self.q.shape[2] * self.tree.attention_area


def make_case(tree: PrefixTree, heads: str, dtype: torch.dtype) -> Case:
    n_heads, n_key_heads, d = HEADS[heads]
    random = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        torch.randn(tree.computed_tokens, n, d, generator=random).to(dtype)
        for n in (n_heads, n_key_heads, n_key_heads, n_heads)
    )
    plan = TreePlan.of(tree)
    row = torch.arange(tree.computed_tokens)
    sees = (row <= row[:, None]) & (row[:, None] < plan.visible_until)
    return Case(tree, plan, *(x.requires_grad_() for x in (q, k, v)), d_out, sees)
