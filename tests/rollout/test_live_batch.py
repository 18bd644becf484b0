from __future__ import annotations

import itertools

import numpy as np
import pytest

from spiral_fast.config import BatchConfig
from spiral_fast.rollout.live_batch import LiveBatch, fill_live_batch
from spiral_fast.trace import SEARCH, Problem, ProblemRollout, Trace, TraceKey


def rollout(draw: int, live: bool) -> ProblemRollout:
    trace = Trace(TraceKey(str(draw), SEARCH, -1, 0), [1], [2], np.zeros(1, np.float32), "stop", 0)
    trace.credit = 0.5 if live else 0.0
    return ProblemRollout(Problem(str(draw), "", ""), draw, [trace], np.zeros((0, 0), np.int64), [])


def fill(alive: list[bool], *, target: int, per_round: int, max_rounds: int):
    rounds = []

    def score(drawn):
        rounds.append([draw for draw, _ in drawn])
        return [rollout(draw, alive[draw]) for draw, _ in drawn]

    draws = ((draw, Problem(str(draw), "", "")) for draw in itertools.count())
    batch = LiveBatch()
    settings = BatchConfig(live_problems=target, round_problems=per_round, max_rounds=max_rounds)
    fill_live_batch(batch, draws, score, settings)
    return batch, rounds, next(draws)[0]


def numbers(rollouts) -> list[int]:
    return [rollout.draw for rollout in rollouts]


def test_live_problems_are_kept_in_draw_order_and_the_surplus_is_the_last_drawn():
    batch, rounds, _ = fill([True, False, True, False, True, True, True, True], target=3, per_round=4, max_rounds=5)
    assert rounds == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numbers(batch.live) == [0, 2, 4]
    assert numbers(batch.dead) == [1, 3]
    assert numbers(batch.discarded) == [5, 6, 7]
    assert numbers(batch.drawn()) == list(range(8))
    assert batch.rounds == 2


@pytest.mark.parametrize("alive", [[False] * 12, [True, True] + [False] * 10])
def test_rounds_are_bounded_and_a_short_batch_is_returned(alive):
    batch, rounds, next_draw = fill(alive, target=4, per_round=4, max_rounds=3)
    assert batch.rounds == len(rounds) == 3
    assert numbers(batch.live) == [i for i, a in enumerate(alive) if a]
    assert next_draw == 12  # nothing drawn is drawn again


def test_no_round_is_drawn_beyond_a_full_batch():
    batch, rounds, next_draw = fill([True] * 4, target=4, per_round=4, max_rounds=3)
    assert batch.rounds == 1 and next_draw == 4 and not batch.discarded


def test_a_failing_round_leaves_the_rounds_before_it():
    batch = LiveBatch()

    def score(drawn):
        if drawn[0][0] == 2:
            raise FloatingPointError
        return [rollout(draw, True) for draw, _ in drawn]

    draws = ((draw, Problem(str(draw), "", "")) for draw in itertools.count())
    with pytest.raises(FloatingPointError):
        fill_live_batch(batch, draws, score, BatchConfig(live_problems=8, round_problems=2, max_rounds=4))
    assert numbers(batch.live) == [0, 1] and batch.rounds == 2
