"""The checks, in the order in which they run. A new one is a function of the subject and a line here."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from spiral_fast.learner.as_float32 import as_float32, extra_bytes
from spiral_fast.verify.cached_cold import cached_is_cold
from spiral_fast.verify.engine_learner import engine_is_learner
from spiral_fast.verify.memory import memory_for_the_largest_step, memory_of
from spiral_fast.verify.result import Result, not_applicable
from spiral_fast.verify.round_trip import rewards_round_trip
from spiral_fast.verify.sharded import fsdp_is_plain
from spiral_fast.verify.sharing import sharing_changes_nothing
from spiral_fast.verify.split import split_changes_nothing
from spiral_fast.verify.subject import Subject

Check = Callable[[Subject], Result]


def in_float32(check: Check, *, of_engine: bool) -> Check:
    """The check on the same weights in float32, on one problem: where rounding is small, a mistake shows. `of_engine`:
    what a server computes, with weights of its own, cannot be checked so."""

    def run(subject: Subject) -> Result:
        if subject.dtype == torch.float32:
            return not_applicable("the model is float32")
        if of_engine and subject.on_servers:
            return not_applicable("an SGLang server computes in its own dtype")
        there, extra = memory_of(subject.learner.device), extra_bytes(subject.loaded.model)
        if 3 * extra > there:
            return not_applicable(f"the model in float32 takes {2 * extra / 1e9:.0f} GB of {there / 1e9:.0f}")
        exact = copy.copy(subject)
        with as_float32(subject.loaded.model):
            if not subject.on_servers:
                exact.traces = exact.sample(subject.drawn[:1], max(8, subject.limit // 4))
            return check(exact)

    return run


CHECKS: dict[str, Check] = {  # those in float32 and that of FSDP first: the last one shards the model for good
    "engine = learner in float32": in_float32(engine_is_learner, of_engine=True),
    "cached = cold in float32": in_float32(cached_is_cold, of_engine=True),
    "sharing invariance in float32": in_float32(sharing_changes_nothing, of_engine=False),
    "FSDP = plain": fsdp_is_plain,
    "engine = learner": engine_is_learner,
    "cached = cold": cached_is_cold,
    "sharing invariance": sharing_changes_nothing,
    "split invariance": split_changes_nothing,
    "reward round trip": rewards_round_trip,
    "memory, largest step": memory_for_the_largest_step,
}
