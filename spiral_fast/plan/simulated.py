"""Rollouts of stated lengths and rewards, made by the trainer's own two stages over an engine that samples noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spiral_fast.algorithms import ALGORITHMS
from spiral_fast.config import Config, ConfigError
from spiral_fast.credit import credit_of
from spiral_fast.levels import levels_of, max_new_tokens
from spiral_fast.plan.lengths import Lengths
from spiral_fast.prompts.text import TextPrompts
from spiral_fast.rollout.engine import Completion, Request, TokenCounts
from spiral_fast.rollout.two_stage import draw_sets, roll_out
from spiral_fast.trace import SEARCH, Aggregated, Problem, ProblemRollout, Trace, TraceKey

VOCABULARY = 100_000  # ids that noise is drawn from: chance agreements stay as rare as in text
CHARACTERS = 4  # of a token of the templates' English


@dataclass(frozen=True)
class Workload:
    """How long and how good the traces are."""

    lengths: Lengths
    prompt_tokens: int  # of a search prompt
    solve_rate: float | None  # chance that a trace is right; None: each problem has its own, uniform in 0..1


class Simulated:
    """Problem d of the run: its lengths and rewards depend on d alone."""

    def __init__(self, config: Config, workload: Workload):
        self.config, self.workload = config, workload
        self._credit = credit_of(config)

    def outline(self, draw: int) -> ProblemRollout:
        """Credited, its traces as long and as good as those of `rollouts`, without tokens: cheap."""
        settings = self.config.rollout
        rollout = ProblemRollout(_problem(draw), draw, [], np.zeros((0, 0), np.int64), [])
        rollout.search = [self._outline(TraceKey(str(draw), SEARCH, -1, i)) for i in range(settings.n_search)]
        for number, level in enumerate(levels_of(self.config), start=1):
            keys = [
                [TraceKey(str(draw), number, k, j) for j in range(level.n_aggregations)] for k in range(level.all_sets)
            ]
            groups = [[self._outline(key) for key in of_set] for of_set in keys]
            rollout.add_level(Aggregated(draw_sets(rollout, self.config, number), groups))
        self._credit(rollout)
        return rollout

    def rollouts(self, draws: list[int]) -> list[ProblemRollout]:
        """Of these problems, with prompts and tokens, graded and credited."""
        engine = _Noise(self)
        prompts = _Prompts(self.workload.prompt_tokens)

        def grade(problem: Problem, trace: Trace) -> None:
            self._grade(trace)

        found = roll_out(engine, prompts, [(draw, _problem(draw)) for draw in draws], self.config, on_trace=grade)
        for rollout in found:
            self._credit(rollout)
        return found

    def length(self, key: TraceKey) -> int:
        most = max_new_tokens(self.config, key.level)
        return int(self.workload.lengths.sample(_random(key, 0), key.level, 1, most)[0])

    def _outline(self, key: TraceKey) -> Trace:
        trace = Trace(key, [], range(self.length(key)), np.empty(0, np.float32), "stop", 0)
        self._grade(trace)
        return trace

    def _grade(self, trace: Trace) -> None:
        rate = self.workload.solve_rate
        if rate is None:
            rate = np.random.default_rng([int(trace.key.problem), 7]).random()
        chance = _random(trace.key, 1).random()
        trace.reward = float(chance < rate)
        trace.answer = "right" if trace.reward else f"wrong {int(1e6 * chance)}"


class _Noise:
    """An engine (rollout/engine.py) that finishes everything at once."""

    name, per_request_seed, bitwise_resume, max_context = "noise", True, True, 2**31

    def __init__(self, simulated: Simulated):
        self._simulated = simulated
        self._pending: list[Request] = []
        self._tickets = 0
        self.counts = TokenCounts()

    def add(self, request: Request) -> int:
        self._pending.append(request)
        self._tickets += 1
        return self._tickets - 1

    def step(self) -> list[tuple[int, Completion]]:
        pending, self._pending = self._pending, []
        first = self._tickets - len(pending)
        return [(first + i, self._completion(request)) for i, request in enumerate(pending)]

    def _completion(self, request: Request) -> Completion:
        n = self._simulated.length(request.key)
        tokens = _random(request.key, 2).integers(0, VOCABULARY, n).tolist()
        n_prompt = len(request.prompt)
        return Completion(tokens, np.zeros(n, np.float32), "stop", 0, n_prompt, 0, n_prompt)

    def set_policy(self, version: int) -> None: ...

    def abandon(self) -> None:
        self._pending = []

    def close(self) -> None: ...


class _Prompts(TextPrompts):
    """The trainer's templates; a search prompt has `prompt_tokens` tokens."""

    def __init__(self, prompt_tokens: int):
        super().__init__(_Tokenizer(), [1, 2, 3], [4, 5, 6], prompt_tokens)
        self._question = prompt_tokens - len(self.head) - len(self._search_end)
        if self._question < 1:
            raise ConfigError(f"--prompt-tokens: {prompt_tokens} are fewer than the template's own; give more")

    def _start(self, problem: Problem) -> list[int]:
        noise = np.random.default_rng([int(problem.id), 3]).integers(0, VOCABULARY, self._question)
        return [*self.head, *noise.tolist()]


class _Tokenizer:
    """Text of the templates in pieces of CHARACTERS."""

    added_tokens_decoder: dict = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        pieces = (text[i : i + CHARACTERS] for i in range(0, len(text), CHARACTERS))
        return [int.from_bytes(piece.encode(), "little") % VOCABULARY for piece in pieces]

    def decode(self, tokens: list[int], **settings) -> str:
        return ""


@dataclass(frozen=True)
class Liveness:
    """Of many problems, without tokens."""

    problems: int  # looked at
    live: int

    @cached_property
    def share(self) -> float:
        return self.live / self.problems


def liveness(simulated: Simulated, problems: int) -> tuple[Liveness, list[int]]:
    """Of the first `problems` draws, and which of them are live."""
    live = [draw for draw in range(problems) if simulated.outline(draw).live]
    return Liveness(problems, len(live)), live


def aggregates(config: Config) -> bool:
    return ALGORITHMS[config.credit.algorithm].aggregates


def _problem(draw: int) -> Problem:
    return Problem(str(draw), "", "")


def _random(key: TraceKey, purpose: int) -> np.random.Generator:
    return np.random.default_rng([int(key.problem), key.level, key.set + 1, key.index, purpose])
