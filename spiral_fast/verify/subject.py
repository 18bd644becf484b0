"""What is verified: the run's own model, learner and engine, and a sample of its traces.

How much is sampled follows from the speed measured here; `shortened` says what was left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest

import numpy as np
import torch

from spiral_fast.config import Config
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.levels import max_new_tokens
from spiral_fast.problems import Draws
from spiral_fast.rollout.chosen import chosen_engine
from spiral_fast.rollout.engine import Engine
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import SetUp
from spiral_fast.trace import Problem, Trace

MAX_PROBLEMS = 4  # whose traces are sampled
ROLLOUT_S = 15.0  # seconds their rollout may take
GRADIENT_S = 10.0  # seconds one gradient may take


class Subject:
    """The learner is one without FSDP until the check of FSDP has made it the run's own."""

    def __init__(self, config: Config, parts: SetUp):
        self.config = config
        self.problems, self.loaded, self.prompts, self.worst = parts.problems, parts.loaded, parts.prompts, parts.worst
        changes = {"self_check": False}  # it is a check of its own here
        if config.learner.fsdp:
            changes |= {"fsdp": False, "checkpointing": False}
        plain = config.learner.model_copy(update=changes)
        self.learner = Learner(config.model_copy(update={"learner": plain}), parts.loaded)
        order = Draws(len(self.problems.train), config.seed, config.problems.shuffle)
        self.drawn: list[tuple[int, Problem]] = [
            (draw, self.problems.train[order[draw]]) for draw in range(min(MAX_PROBLEMS, len(self.problems.train)))
        ]
        self.traces: list[Trace] = []  # from here on filled by `measure`
        self.limit = 0  # L_max of these traces
        self.shortened = ""  # what they lack
        self.learner_tokens_per_s = 0.0
        self._on_servers: Engine | None = None  # kept: a server takes long to start
        self._version = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.causal_lm.get_output_embeddings().weight.dtype

    @property
    def on_servers(self) -> bool:
        """The engine computes with weights of its own, in the dtype they were loaded in."""
        return chosen_engine(self.config.rollout, cuda=self.loaded.device.type == "cuda") == "sglang"

    def new_engine(self) -> Engine:
        return make_engine(self.config, self.loaded)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine of the run over the learner's present weights, its cache empty."""
        engine = self._on_servers or self.new_engine()
        if self.on_servers:
            self._on_servers = engine
        try:
            self.update(engine)
            yield engine
        finally:
            if engine is not self._on_servers:
                engine.close()

    def update(self, engine: Engine) -> None:
        """The learner's weights have changed."""
        self._version += 1
        engine.set_policy(self._version)

    def close(self) -> None:
        if self._on_servers:
            self._on_servers.close()

    def measure(self) -> None:
        """Sample as many traces, as long as they fit the time, and see how fast the learner is."""
        settings = self.config.rollout
        longest = max(max_new_tokens(self.config, level) for level in range(2 + len(settings.levels)))
        self.sample(self.drawn[:1], 2)  # the first calls also compile
        per_token = _seconds(lambda: self.sample(self.drawn[:1], 8)) / 8
        self.limit = int(max(8, min(longest, ROLLOUT_S / per_token)))
        self.drawn = self.drawn[: int(max(1, ROLLOUT_S / (per_token * self.limit)))]
        self.sample_traces()
        if self.limit < longest:
            self.shortened = f"traces cut at {self.limit} of {longest} tokens"
        rows = self.rows(self.traces[:2])
        self.learner.accumulate(rows)
        seconds = _seconds(lambda: self.learner.accumulate(rows))
        self.learner_tokens_per_s = sum(row.computed_tokens for row in rows) / seconds

    def sample_traces(self) -> None:
        self.traces = self.sample(self.drawn, self.limit)

    def sample(self, drawn: list[tuple[int, Problem]], limit: int) -> list[Trace]:
        """All search traces and one aggregation trace per set (of rollout.levels all), by the run's own rollout, cut at
        `limit` tokens."""
        rollout = self.config.rollout
        changes = {
            "search_max_new_tokens": min(limit, rollout.search_max_new_tokens),
            "aggregation_max_new_tokens": min(limit, rollout.aggregation_max_new_tokens),
            "n_aggregations": min(1, rollout.n_aggregations),
            "levels": [
                level.model_copy(update={"max_new_tokens": min(limit, level.max_new_tokens)})
                for level in rollout.levels
            ],
        }
        config = self.config.model_copy(update={"rollout": rollout.model_copy(update=changes)})
        with self.engine() as engine, self.learner.rollout_weights():
            rollouts = roll_out(engine, self.prompts, drawn, config)
        return [trace for each in rollouts for trace in each.traces()]

    def rows(self, traces: Sequence[Trace]) -> list[Row]:
        """Rows as the learner trains on, with credits from a seed: real ones may all be zero."""
        credits = np.random.default_rng(0).standard_normal(len(traces))
        return [
            Row(trace.prompt, trace.tokens, trace.logp, float(credit), 1 / len(traces), trace.key.level)
            for trace, credit in zip(traces, credits, strict=True)
        ]

    def gradient_rows(self) -> list[Row]:
        """Rows of both levels in turn: at least four, else what one micro-batch holds and the time allows."""
        found = sorted({trace.key.level for trace in self.traces})
        levels = [[trace for trace in self.traces if trace.key.level == level] for level in found]
        room = min(self.config.learner.micro_batch_tokens, GRADIENT_S * self.learner_tokens_per_s)
        kept: list[Trace] = []
        for trace in filter(None, chain.from_iterable(zip_longest(*levels))):
            room -= len(trace.prompt) + len(trace.tokens) - 1
            if room < 0 and len(kept) >= 4:
                break
            kept.append(trace)
        return self.rows(kept)

    def gradient(self, rows: Sequence[Row], micro_batch_tokens: int, **changes) -> torch.Tensor:
        """The adapter's gradient before clipping, flat, float64, with `changes` to the learner's config. Raises
        FloatingPointError when there is none."""
        learner = self.learner
        settings = learner.config
        changes |= {"micro_batch_tokens": micro_batch_tokens, "clip_norm": None}
        learner.config = settings.model_copy(update=changes)
        try:
            stats = learner.accumulate(rows)
        finally:
            learner.config = settings
        if stats.skipped_reason:
            raise FloatingPointError(stats.skipped_reason)
        return learner.gradient().double()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
