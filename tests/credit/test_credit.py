"""From a problem's traces to their credits: GRPO, the gate, `credit_of`, `search_weight`."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from spiral_fast.config import Config, ConfigError
from spiral_fast.credit import credit_of, search_weight
from spiral_fast.credit.gate import gate
from spiral_fast.credit.grpo import grpo_credits
from spiral_fast.credit.spiral import spiral_credits
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey
from spiral_kernels.set_advantages import set_advantages


def make_config(rollout=None, **credit) -> Config:
    return Config.model_validate(
        {
            "run_dir": "runs/x",
            "model": {"path": "builtin:parts"},
            "problems": {"source": "parts"},
            "rollout": rollout or {"n_search": 4, "set_size": 2, "n_sets": 3, "n_aggregations": 2},
            "credit": credit,
        }
    )


def trace(level, set_, index, length, reward) -> Trace:
    key = TraceKey("p", level, set_, index)
    return Trace(key, [1], [2] * length, np.zeros(length, np.float32), "stop", 0, reward=reward)


def rollout(sets, rewards, search_lengths, aggregation_lengths) -> ProblemRollout:
    search = [trace(SEARCH, -1, i, length, None) for i, length in enumerate(search_lengths)]
    aggregation = [
        [trace(AGGREGATION, k, j, length, r) for j, (length, r) in enumerate(zip(lengths, row, strict=True))]
        for k, (lengths, row) in enumerate(zip(aggregation_lengths, rewards, strict=True))
    ]
    return ProblemRollout(Problem("p", "q", "a"), 0, search, np.array(sets), aggregation)


def test_grpo_on_all_2_to_8_groups():
    for rewards in product([0, 1], repeat=8):
        expected = [Fraction(r) - Fraction(sum(rewards), 8) for r in rewards]
        found = grpo_credits(np.array(rewards, np.float64))
        assert found.tolist() == [float(e) for e in expected]  # eighths are exact in floating point


@pytest.mark.parametrize("n", [3, 6, 7, 12])
def test_grpo_zero_exactly_where_the_fraction_is(n):
    rng = np.random.default_rng(0)
    for rewards in rng.integers(-2, 3, (300, n)):
        expected = [Fraction(int(r)) - Fraction(int(rewards.sum()), n) for r in rewards]
        found = grpo_credits(rewards.astype(np.float64))
        np.testing.assert_allclose(found, [float(e) for e in expected], atol=1e-14)
        assert [f == 0 for f in found] == [e == 0 for e in expected]


def test_grpo_large_integers_are_compared_exactly():
    assert grpo_credits(np.array([10.0**10, 10.0**10 + 1])).tolist() == [-0.5, 0.5]


def test_grpo_real_rewards_use_the_tolerance():
    assert not grpo_credits(np.array([0.1 + 0.2, 0.3, 0.3])).any()
    assert grpo_credits(np.array([0.3 + 1e-7, 0.3, 0.3])).all()
    assert not grpo_credits(np.full(7, 0.1)).any()


def test_gate():
    credit, length = np.array([0.5, 0.5, 0.5, -0.5, 0.0]), np.array([9, 10, 11, 11, 11])
    after, gated = gate(credit, length, 10)
    assert after.tolist() == [0.5, 0.5, 0.0, -0.5, 0.0]  # length = target is kept
    assert gated.tolist() == [False, False, True, False, False]  # a credit that was zero was not gated
    after, gated = gate(credit, length, None)
    assert after.tolist() == credit.tolist() and not gated.any()


def test_gate_equals_the_gate_of_the_kernel():
    rng = np.random.default_rng(0)
    rewards, lengths = rng.integers(0, 2, (3, 4)).astype(float), rng.integers(1, 20, 12)
    sets = np.array([[0, 1], [1, 2], [2, 3]])
    search, aggregation = spiral_credits(rewards, sets, 12)
    kernel = set_advantages(
        torch.tensor(rewards)[None],
        torch.tensor(sets)[None],
        12,
        search_length=torch.tensor(lengths)[None],
        aggregation_length=torch.tensor(lengths).view(1, 3, 4),
        search_target=8,
        aggregation_target=12,
    )
    assert gate(search, lengths, 8)[0].tolist() == kernel.search[0].tolist()
    assert gate(aggregation.ravel(), lengths, 12)[0].tolist() == kernel.aggregation.flatten().tolist()


def test_spiral_fills_credit_and_gated_of_every_trace():
    problem = rollout(
        sets=[[0, 1], [1, 2], [0, 2]],
        rewards=[[1, 1], [1, 0], [0, 0]],
        search_lengths=[3, 4, 9, 9],
        aggregation_lengths=[[5, 5], [6, 5], [5, 5]],
    )
    credit_of(make_config(search_target_length=3, aggregation_target_length=5))(problem)
    # f = 1, 1/2, 0; b = 1/2; A# = 1/2, 0, -1/2
    assert [t.credit for t in problem.search] == [0.0, 0.0, -0.25, 0.0]
    assert [t.gated for t in problem.search] == [False, True, False, False]
    assert [[t.credit for t in g] for g in problem.aggregation] == [[0.0, 0.0], [0.0, -0.5], [0.0, 0.0]]
    assert [[t.gated for t in g] for g in problem.aggregation] == [[False] * 2, [True, False], [False] * 2]
    assert problem.live

    credit_of(make_config())(problem)  # the gate off: a second call starts from the rewards
    assert [t.credit for t in problem.search] == [0.0, 0.25, -0.25, 0.0]
    assert [t.gated for t in problem.traces()] == [False] * 10


def test_a_problem_whose_sets_all_score_alike_is_dead():
    problem = rollout([[0, 1], [1, 2], [2, 3]], [[1, 1], [1, 1], [1, 1]], [1] * 4, [[1, 1]] * 3)
    credit_of(make_config())(problem)
    assert not problem.live


def test_grpo_fills_credit_from_the_own_rewards():
    none = {"n_search": 4, "set_size": 0, "n_sets": 0, "n_aggregations": 0}
    group = [trace(SEARCH, -1, i, length, r) for i, (length, r) in enumerate([(5, 1), (6, 1), (5, 0), (6, 0)])]
    problem = ProblemRollout(Problem("p", "q", "a"), 0, group, np.zeros((0, 0), np.int64), [])
    credit_of(make_config(none, algorithm="grpo", search_target_length=5))(problem)
    assert [t.credit for t in group] == [0.5, 0.0, -0.5, -0.5]
    assert [t.gated for t in group] == [False, True, False, False]


def three_sets(search_rewards=(None,) * 4) -> ProblemRollout:
    """f = 1, 1/2, 0, of the sets (0, 1), (1, 2), (0, 2); trace 3 is in none."""
    problem = rollout([[0, 1], [1, 2], [0, 2]], [[1, 1], [1, 0], [0, 0]], [3, 4, 9, 9], [[5, 5], [6, 5], [5, 5]])
    for trace, reward, answer in zip(problem.search, search_rewards, ["4", "4", "5", None], strict=True):
        trace.reward, trace.answer = reward, answer
    return problem


def credits(problem: ProblemRollout, **credit) -> tuple[list, list]:
    credit_of(make_config(**credit))(problem)
    return [t.credit for t in problem.search], [[t.credit for t in g] for g in problem.aggregation]


def test_aggregator_only_needs_no_search_reward():
    problem = three_sets()
    assert credits(problem, algorithm="aggregator_only") == ([0.0] * 4, [[0.0, 0.0], [0.5, -0.5], [0.0, 0.0]])
    assert credits(problem, algorithm="aggregator_only", aggregation_target_length=5)[1][1] == [0.0, -0.5]
    assert [t.gated for t in problem.aggregation[1]] == [True, False]


def test_search_only_is_the_search_credit_of_spiral():
    assert credits(three_sets(), algorithm="search_only") == ([0.0, 0.25, -0.25, 0.0], [[0.0, 0.0]] * 3)


def test_independent_reads_the_rewards_of_both_levels():
    expected = ([0.75, -0.25, -0.25, -0.25], [[0.0, 0.0], [0.5, -0.5], [0.0, 0.0]])
    assert credits(three_sets([1, 0, 0, 0]), algorithm="independent") == expected
    problem = three_sets([1, 1, 1, 1])  # dead above, live below
    assert credits(problem, algorithm="independent")[0] == [0.0] * 4 and problem.live
    with pytest.raises(ValueError, match="level=0.*has no reward"):
        credits(three_sets(), algorithm="independent")


def test_poly_epo_reads_rewards_and_answers_of_the_search_traces():
    problem = three_sets([1, 0, 1, 0])
    problem.aggregation = [[], [], []]
    none = {"n_search": 4, "set_size": 2, "n_sets": 3, "n_aggregations": 0}
    fill = credit_of(make_config(none, algorithm="poly_epo", search_target_length=4))
    fill(problem)  # mean r = 1/2, 1/2, 1; d = 1/2, 1, 1; f = 1/4, 1/2, 1; mean f = 7/12
    expected = [5 / 8 - 7 / 12, 3 / 8 - 7 / 12, 0.0, 0.0]  # the third is 3/4 - 7/12, gated
    assert [t.credit for t in problem.search] == pytest.approx(expected, abs=1e-15)
    assert [t.gated for t in problem.search] == [False, False, True, False]
    for t in problem.search:
        t.answer = None  # d = 0 everywhere
    fill(problem)
    assert not problem.live


def test_a_diversity_that_cannot_be_loaded_is_refused_before_the_first_problem():
    with pytest.raises(ConfigError, match="credit.diversity: 'no.such.d' cannot be used"):
        credit_of(make_config(algorithm="poly_epo", diversity="no.such.d"))


def test_a_trace_without_reward_is_named():
    problem = rollout([[0, 1], [1, 2], [2, 3]], [[1, 1], [1, None], [1, 1]], [1] * 4, [[1, 1]] * 3)
    with pytest.raises(ValueError, match="set=1, index=1.*has no reward"):
        credit_of(make_config())(problem)


def test_search_weight():
    assert search_weight(make_config()) == 1.0
    assert search_weight(make_config(search_weight=2.5)) == 2.5
    paper = {"n_search": 8, "set_size": 4, "n_sets": 4, "n_aggregations": 4}
    assert search_weight(make_config(paper, search_weight="unbiased")) == pytest.approx(12 / 0.885788449)
    balanced = make_config({**paper, "set_sampler": "balanced"}, search_weight="unbiased")
    assert search_weight(balanced) == 12.0
    independent = make_config(paper, algorithm="independent", search_weight="unbiased")
    assert search_weight(independent) == 12 / 7
