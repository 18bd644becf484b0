"""Problems whose requests an engine loses are drawn again as a whole: training, evaluation, and `generate`."""

from __future__ import annotations

import dataclasses

import pytest

from spiral_fast.credit import credit_of
from spiral_fast.evaluate.sampling import Sampler, n_traces
from spiral_fast.rewards import make_grader
from spiral_fast.rewards.grading import Grading
from spiral_fast.rollout.engine import MOST_LOSSES, EngineFailed, RequestsLost, generate
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from spiral_fast.trace import AGGREGATION
from tests.rollout.losing import LosingEngine
from tests.rollout.test_two_stage import configure
from tests.rollout.tiny_models import make_engine as tiny_engine
from tests.rollout.tiny_models import request, tiny_model

CONFIG = configure("rollout.max_running=20", "evaluate.samples=6", "evaluate.pass_at=[1]", "evaluate.majority_at=[]")


@pytest.fixture(scope="module")
def parts():
    return set_up(CONFIG)


@pytest.fixture(scope="module")
def undisturbed(parts):
    return roll_out(make_engine(CONFIG, parts.loaded), parts.prompts, drawn(parts), CONFIG)


def drawn(parts):
    return [(draw, parts.problems.train[draw]) for draw in range(4)]


def tokens(rollouts) -> list:
    return [(r.draw, r.sets.tolist(), [(t.key, t.prompt, t.tokens) for t in r.traces()]) for r in rollouts]


def losing(parts, loses) -> LosingEngine:
    return LosingEngine(make_engine(CONFIG, parts.loaded), loses)


def in_aggregation(parts, problem: str, seen: list):
    """Loses the problem once, after some of its aggregation traces have finished."""
    lost = []

    def loses(_, pending):
        done = [t for p, t in seen if p == problem and t.key.level == AGGREGATION]
        if lost or not done or problem not in pending:
            return set()
        lost.append(len(done))
        return {problem}

    return loses, lost


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_rollout_ends_as_if_nothing_had_been_lost(parts, undisturbed, at):
    engine = losing(parts, lambda step, pending: pending if step == at else set())
    seen = []
    found = roll_out(engine, parts.prompts, drawn(parts), CONFIG, lambda *progress: seen.append(progress))
    assert tokens(found) == tokens(undisturbed)
    assert seen[-1] == (96, 96) and all(0 <= done <= 96 == total for done, total in seen)


def test_all_traces_of_a_lost_problem_are_new_and_the_others_are_kept(parts, undisturbed):
    seen, progress = [], []
    victim = parts.problems.train[1].id
    loses, lost = in_aggregation(parts, victim, seen)
    engine = losing(parts, loses)
    found = roll_out(
        engine,
        parts.prompts,
        drawn(parts),
        CONFIG,
        lambda done, total: progress.append(done),
        lambda problem, trace: seen.append((problem.id, trace)),
    )
    assert tokens(found) == tokens(undisturbed) and 0 < lost[0] < 16
    ours = {id(trace) for rollout in found for trace in rollout.traces()}
    dropped = [problem for problem, trace in seen if id(trace) not in ours]
    assert dropped == [victim] * (8 + lost[0])  # its whole search too, though that had been complete
    assert len(seen) == 96 + len(dropped) and progress[-1] == 96
    assert max(before - after for before, after in zip(progress, progress[1:], strict=False)) == len(dropped)


def test_rewards_and_credits_are_those_of_an_undisturbed_round(parts):
    """Traces that were handed to the grader and then dropped change nothing."""

    def scored(engine, submitted):
        with make_grader(CONFIG) as grader, Grading(grader) as grading:

            def submit(problem, trace):
                submitted.append((problem.id, trace))
                grading.submit(problem, trace)

            rollouts = roll_out(engine, parts.prompts, drawn(parts), CONFIG, on_trace=submit)
            grading.finish(rollouts)
        for rollout in rollouts:
            credit_of(CONFIG)(rollout)
        return [(t.key, t.reward, t.verdict, t.credit) for rollout in rollouts for t in rollout.traces()]

    expected = scored(make_engine(CONFIG, parts.loaded), [])
    seen: list = []
    loses, lost = in_aggregation(parts, parts.problems.train[1].id, seen)
    assert scored(losing(parts, loses), seen) == expected and lost


def test_a_problem_lost_too_often_stops_the_run(parts):
    victim = parts.problems.train[3].id
    times = []

    def loses(step, pending):
        if victim not in pending:
            return set()
        times.append(step)
        return {victim}

    with pytest.raises(
        EngineFailed, match=f"'{victim}'.* lost 4 times, last by the server http://there: it was killed"
    ):
        roll_out(losing(parts, loses), parts.prompts, drawn(parts), CONFIG)
    assert len(times) == MOST_LOSSES + 1


def test_a_problem_drawn_twice_counts_each_loss_once(parts):
    problem = parts.problems.train[0]
    engine = losing(parts, lambda step, pending: pending if step <= MOST_LOSSES else set())
    first, second = roll_out(engine, parts.prompts, [(0, problem), (8, problem)], CONFIG)
    assert len(first.traces()) == len(second.traces()) == 24
    assert [t.tokens for t in first.search] != [t.tokens for t in second.search]


def test_an_evaluation_ends_as_if_nothing_had_been_lost(parts):
    def samples(engine, calls):
        with make_grader(CONFIG) as grader:
            sampler = Sampler(CONFIG, engine, parts.prompts, grader, lambda: calls.append(1))
            found = sampler.everything(parts.problems.eval[:3])
        counts = ("prompt_tokens", "cached_tokens", "computed_tokens", "logp_sum")  # what the cache or rounding decides
        every = [s for one in found for s in one.search + [t for shape in one.rsa for step in shape for t in step]]
        return [{k: v for k, v in dataclasses.asdict(sample).items() if k not in counts} for sample in every]

    expected = samples(make_engine(CONFIG, parts.loaded), [])
    victims, calls = {problem.id for problem in parts.problems.eval[:2]}, []
    engine = losing(parts, lambda step, pending: victims if step in (2, 6, 30) else set())
    assert samples(engine, calls) == expected and len(calls) == len(expected) == 3 * n_traces(CONFIG)
    with pytest.raises(EngineFailed, match="lost 4 times"):
        samples(losing(parts, lambda step, pending: pending if step % 2 else set()), [])


def test_generate_runs_the_lost_again():
    model = tiny_model()
    requests = [request([2, 3, i % 5], seed=i, index=i) for i in range(12)]
    requests = [dataclasses.replace(r, key=r.key._replace(problem="ab"[i % 2])) for i, r in enumerate(requests)]
    expected = [done.tokens for done in generate(tiny_engine(model), requests)]
    engine = LosingEngine(tiny_engine(model), lambda step, pending: {"a"} if step in (2, 4) else set())
    assert [done.tokens for done in generate(engine, requests)] == expected
    with pytest.raises(EngineFailed, match="problem 'a'.*"):
        generate(LosingEngine(tiny_engine(model), lambda step, pending: {"a"}), requests)


def test_the_error_says_what_was_lost():
    error = RequestsLost(iter([4, 7]), "http://there", "it is silent")
    assert error.tickets == [4, 7] and str(error) == "the server http://there was lost with 2 requests: it is silent"
