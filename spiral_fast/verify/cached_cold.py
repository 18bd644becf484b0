"""Cached = cold: requests served from a warm cache give what they give with an empty one."""

from __future__ import annotations

from spiral_fast.learner.learner import Row
from spiral_fast.learner.nonzero_adapter import nonzero_adapter
from spiral_fast.rollout.engine import Completion, Engine, Request, generate, request_seed
from spiral_fast.verify.log_probs import compare
from spiral_fast.verify.result import FAIL, Result
from spiral_fast.verify.subject import Subject

NEW_TOKENS = 8  # of each request: what the cache holds is the prompt


def cached_is_cold(subject: Subject) -> Result:
    """The warm engine has served the same requests under another policy, and half of them under this one.

    Where requests have their own random numbers, both draw the same ones; rounding may still turn a token, so log-probs
    are compared up to there. Where they have not, the learner says what a cold engine would have given.
    """
    requests = [
        Request(
            trace.key,
            tuple(trace.prompt),
            min(NEW_TOKENS, subject.limit),
            subject.config.rollout.temperature,
            request_seed(subject.config.seed, 0, trace.key),
        )
        for trace in subject.traces
    ]
    with subject.engine() as engine:
        cold = _serve(subject, engine, requests)
    with subject.engine() as engine:
        with nonzero_adapter(subject.loaded.model, seed=1):
            subject.update(engine)
            _serve(subject, engine, requests)
        subject.update(engine)
        _serve(subject, engine, requests[::2])
        warm = _serve(subject, engine, requests)
    cached, prompt = (sum(getattr(done, name) for done in warm) for name in ("cached_tokens", "prompt_tokens"))
    note = f"{cached:,} of {prompt:,} prompt tokens from the cache"
    if not engine.per_request_seed:
        rows = [
            Row(list(asked.prompt), done.tokens, done.logp, 1.0, 1.0, asked.key.level)
            for asked, done in zip(requests, warm, strict=True)
        ]
        return compare([done.logp for done in warm], subject.learner.log_probs(rows), subject.dtype, note)
    same = [_common(a, b) for a, b in zip(cold, warm, strict=True)]
    note += f"; {same.count(NEW_TOKENS)} of {len(same)} traces equal"
    if not any(same):
        return Result(FAIL, "no trace begins with the same token", note=note)
    pairs = [(a.logp[:n], b.logp[:n]) for a, b, n in zip(cold, warm, same, strict=True) if n]
    return compare(*zip(*pairs, strict=True), subject.dtype, note)


def _serve(subject: Subject, engine: Engine, requests: list[Request]) -> list[Completion]:
    with subject.learner.rollout_weights():
        return generate(engine, requests)


def _common(a: Completion, b: Completion) -> int:
    """Tokens until the first that differs."""
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
