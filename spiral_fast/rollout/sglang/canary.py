"""Proof that a server computes the learner's policy: a few tokens it samples have the log-probs the learner gives them.

The learner computes them with its own code from its own weights, so a wrong base model, tensors that did not arrive, a
lost scale, another temperature or keys and values of an older version all show.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from spiral_fast.learner.nonzero_adapter import nonzero_adapter
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import EngineFailed
from spiral_fast.rollout.sglang.client import Client, RequestRefused
from spiral_fast.rollout.sglang.identity import ServerIdentity

NEW_TOKENS = 24
# Largest |difference| of a token's log-prob in float32; 120 checks of a tiny model on a CPU: 1.2e-5, the median 2e-6.
LARGEST_GAP = 1e-3
# Mean |difference| of the tokens' log-probs in 16 bits, where two right computations differ by some 0.06 nats.
LARGEST_GAP_16_BIT = 0.2
# In 16 bits an adapter is there if its own log-probs are so much nearer than those without it; measured: 5 to 14 times.
NEARER = 3.0
OTHER_NAMES = {"half": "float16", "float": "float32"}  # of SGLang's dtypes; its "auto" says nothing
SAMPLES = 4  # of which the mean is taken for that


class CanaryFailed(EngineFailed):
    """The server does not compute the learner's policy; the message has both figures and what to do."""


def canary_prompt(vocabulary: int) -> list[int]:
    """32 tokens from all over the vocabulary, the first and the last included; long enough for positions to matter."""
    return torch.linspace(0, vocabulary - 1, 32).long().tolist()


async def check_server(client: Client, source: PolicySource, temperature: float, *, name: str = "probe") -> None:
    """At the start: the server has the learner's base model, and applies every tensor of an adapter and its scale.

    The adapters tried are non-zero ones on the learner's layers, loaded under `name` with their role and unloaded
    again: a fresh one's B is zero and would prove nothing. Two are there together, and each has its own log-probs.
    Raises CanaryFailed.
    """
    _compare_names(client.url, await client.identity(), source)
    await _compare(client, None, source, temperature, "its base model is not the learner's: give both one model.path")
    with nonzero_adapter(source.model, seed=0):
        loaded: dict[str, str] = {}
        why = "it does not apply the adapter it was sent as the learner does"
        try:
            for role in source.roles.names:
                await client.load_adapter(f"{name}-{role}", source.adapter(role))
                loaded[role] = f"{name}-{role}"
            for role, adapter in loaded.items():
                await _compare(client, adapter, source, temperature, why, role=role, samples=SAMPLES, nearer=NEARER)
        finally:
            for adapter in loaded.values():
                await client.unload_adapter(adapter)


async def check(
    client: Client, adapter: str, source: PolicySource, temperature: float, role: str | None = None
) -> float:
    """The server computes the learner's present policy (of `role`, None: the first) under the name `adapter`. Returns
    the largest |difference| of a token's log-prob. Raises CanaryFailed."""
    why = f"{adapter!r} is not the learner's present adapter; start the server anew, then go on"
    return await _compare(client, adapter, source, temperature, why, role=role)


def _compare_names(url: str, server: ServerIdentity, source: PolicySource) -> None:
    """What the server says about its model is true of the learner's."""
    serves = f"SGLang server {url} serves {server.model_path!r}"
    if server.vocabulary not in (None, source.vocabulary):
        raise CanaryFailed(
            f"{serves}, whose vocabulary has {server.vocabulary} tokens; the learner's has {source.vocabulary}: give "
            "both the same model.path"
        )
    theirs, ours = OTHER_NAMES.get(server.dtype, server.dtype), str(source.dtype).removeprefix("torch.")
    if theirs not in ("auto", ours):
        raise CanaryFailed(f"{serves} in {theirs}; the learner computes in {ours}: give both the same model.dtype")


async def _compare(
    client: Client,
    adapter: str | None,
    source: PolicySource,
    temperature: float,
    otherwise: str,
    *,
    role: str | None = None,
    samples: int = 1,
    nearer: float = 0.0,
) -> float:
    prompt = canary_prompt(source.vocabulary)
    sampling = dict(max_new_tokens=NEW_TOKENS, temperature=temperature, stop_token_ids=source.eos_token_ids)
    try:
        sampled = await asyncio.gather(*(client.generate(prompt, adapter=adapter, **sampling) for _ in range(samples)))
    except RequestRefused as error:
        raise CanaryFailed(f"{error}; {otherwise}") from None
    tokens = np.concatenate([one.tokens for one in sampled])
    theirs = np.concatenate([one.logp for one in sampled])
    base = np.concatenate([source.base_log_probs(prompt, one.tokens, temperature) for one in sampled])
    ours = base
    if adapter is not None:
        ours = np.concatenate([source.log_probs(prompt, one.tokens, temperature, role) for one in sampled])
    gap = np.abs(theirs - ours)
    if source.dtype in (torch.bfloat16, torch.float16):
        right = gap.mean() < LARGEST_GAP_16_BIT and nearer * gap.mean() <= np.abs(base - ours).mean()
    else:
        right = gap.max() < LARGEST_GAP
    if not right:  # NaN is not
        worst = int(np.argmax(np.nan_to_num(gap, nan=np.inf)))
        raise CanaryFailed(
            f"SGLang server {client.url}: token {tokens[worst]} has log-prob {theirs[worst]:.6g} there and "
            f"{ours[worst]:.6g} at the learner (mean |difference| of {len(gap)} tokens {gap.mean():.3g}): {otherwise}"
        )
    return float(gap.max())
