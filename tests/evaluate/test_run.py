"""`evaluate` on the max game, every number computed anew by hand."""

from __future__ import annotations

import json
from concurrent.futures import Future

import numpy as np
import pytest
from rich.console import Console

from spiral_fast.config import Config
from spiral_fast.evaluate import evaluate
from spiral_fast.evaluate.bootstrap import bootstrap_interval
from spiral_fast.evaluate.plots import figures
from spiral_fast.evaluate.rsa import rsa_sets
from spiral_fast.evaluate.table import table
from spiral_fast.rewards.exact import ExactGrader
from spiral_fast.rewards.grader import TooManyUngradable, Verdict
from spiral_fast.rollout.engine import PromptTooLong, request_seed
from spiral_fast.trace import TraceKey
from tests.evaluate.max_game import SILENT, MaxEngine, MaxPrompts, guess, make_problem

PROBLEMS = [make_problem(d) for d in (1, 3, 6, 9)]
NO_SETS = {"n_search": 4, "set_size": 0, "n_sets": 0, "n_aggregations": 0}


def make_config(rollout=None, algorithm="spiral", **settings) -> Config:
    lengths = {"search_max_new_tokens": 3, "aggregation_max_new_tokens": 2}
    return Config.model_validate(
        {
            "run_dir": "runs/x",
            "seed": 5,
            "model": {"path": "x"},
            "problems": {"source": "chain_sum"},
            "rollout": {**lengths, **(rollout or {})},
            "credit": {"algorithm": algorithm},
            "evaluate": {"samples": 12, "pass_at": [1, 4, 12], "majority_at": [1, 3], "bootstrap": 200, **settings},
        }
    )


def run(config, engine=None, problems=PROBLEMS, **options):
    return evaluate(config, engine or MaxEngine(), MaxPrompts(), ExactGrader(), problems, step=7, **options)


def guesses(problem, n):
    digit = int(problem.answer)
    return [guess(digit, request_seed(5, -1, TraceKey(problem.id, 0, -1, i))) for i in range(n)]


def test_pass_and_majority():
    result = run(make_config())
    assert result["step"] == 7 and result["problems"] == 4 and result["samples"] == 12
    right = [sum(g == int(p.answer) for g in guesses(p, 12)) for p in PROBLEMS]
    assert [row["correct"] for row in result["per_problem"]] == right and 0 < sum(right) < 48
    assert result["pass_at_k"]["1"] == pytest.approx(np.mean(right) / 12)
    assert result["pass_at_k"]["12"] == np.mean([r > 0 for r in right])
    assert result["majority_at_k"]["1"] == pytest.approx(result["pass_at_k"]["1"])
    distinct = [len(set(guesses(p, 12)) - {SILENT}) for p in PROBLEMS]
    assert result["distinct_answers"] == np.mean(distinct)
    silent = np.mean([g == SILENT for p in PROBLEMS for g in guesses(p, 12)])
    assert result["stages"][0]["no_answer_share"] == pytest.approx(silent) and silent > 0
    per_problem = np.array(right) / 12
    assert result["intervals"]["pass_at_k"]["1"] == pytest.approx(bootstrap_interval(per_problem, 200, 5))


def test_recursive_self_aggregation():
    """Each step's population is the maximum of the sets drawn from the one before."""
    engine = MaxEngine()
    result = run(make_config(rsa={"steps": 3, "population": 8, "set_size": 3}), engine)
    populations = [guesses(p, 8) for p in PROBLEMS]
    expected = []
    for step in range(4):
        if step:
            for p, problem in enumerate(PROBLEMS):
                before = [-1 if g == SILENT else g for g in populations[p]]
                sets = rsa_sets(8, 3, 5, problem.id, step)
                populations[p] = [max(before[i] for i in members) for members in sets]
        expected.append(
            [np.mean([g == int(q.answer) for g in g8]) for q, g8 in zip(PROBLEMS, populations, strict=True)]
        )
    assert [row["rsa"] for row in result["per_problem"]] == np.transpose(expected).tolist()
    assert result["rsa"] == pytest.approx(np.mean(expected, axis=1).tolist())
    assert result["rsa"][0] < result["rsa"][3]

    keys = [request.key for request in engine.requests]
    assert len(set(keys)) == len(keys) == 4 * (12 + 3 * 8)
    assert [key.level for key in keys] == [0] * 48 + [1] * 32 + [2] * 32 + [3] * 32
    assert len({request.seed for request in engine.requests}) == len(keys)
    first = engine.requests[48]
    members = rsa_sets(8, 3, 5, PROBLEMS[0].id, 1)[0]
    assert list(first.prompt[1:-1]) == [guesses(PROBLEMS[0], 8)[i] for i in members]
    assert first.max_new_tokens == 2 and engine.requests[0].max_new_tokens == 3


def test_rsa_sets():
    sets = rsa_sets(8, 4, 0, "p", 1)
    assert sets.shape == (8, 4) and (np.diff(sets) > 0).all() and sets.min() >= 0 and sets.max() < 8
    assert np.array_equal(sets, rsa_sets(8, 4, 0, "p", 1))
    others = [rsa_sets(8, 4, 1, "p", 1), rsa_sets(8, 4, 0, "q", 1), rsa_sets(8, 4, 0, "p", 2)]
    assert not any(np.array_equal(sets, other) for other in others)
    assert rsa_sets(3, 3, 0, "p", 1).tolist() == [[0, 1, 2]] * 3
    many = np.concatenate([rsa_sets(8, 4, 0, str(p), 1).ravel() for p in range(500)])
    counts = np.bincount(many)  # 16,000 memberships, 2,000 expected each
    assert abs(counts - 2000).max() < 5 * np.sqrt(2000)


def test_a_population_larger_than_the_samples_draws_more_traces():
    config = make_config(samples=4, pass_at=[1, 4], majority_at=[], rsa={"steps": 1, "population": 8, "set_size": 2})
    engine = MaxEngine()
    result = run(config, engine)
    assert [r.key.index for r in engine.requests[:8]] == list(range(8)) and result["samples"] == 4
    assert [row["correct"] for row in result["per_problem"]] == [
        sum(g == int(p.answer) for g in guesses(p, 4)) for p in PROBLEMS
    ]
    assert result["rsa"][0] == np.mean([g == int(p.answer) for p in PROBLEMS for g in guesses(p, 8)])


def test_rsa_off():
    result = run(make_config(rsa={"steps": 0}))
    assert result["rsa"] == [] and len(result["stages"]) == 1
    assert "rsa" not in figures({"a": result})


def test_tokens_lengths_and_entropy():
    engine = MaxEngine()
    run(make_config(), engine)  # counts that were there before do not count
    result = run(make_config(rsa={"steps": 2, "population": 8, "set_size": 4}), engine)
    search, *steps = result["stages"]
    assert search["tokens"] == {"prompt": 48 * 2, "cached": 0, "computed": 48 * 2, "generated": 48 * 2}
    for stage in steps:
        assert stage["tokens"] == {"prompt": 32 * 6, "cached": 0, "computed": 32 * 6, "generated": 32 * 2}
    assert result["tokens"]["generated"] == 48 * 2 + 2 * 32 * 2 and result["tokens"]["prompt"] == 48 * 2 + 2 * 32 * 6
    assert search["mean_length"] == 2 and search["cut_share"] == 0 and search["could_not_grade_share"] == 0
    assert result["search_entropy"] == pytest.approx(0.5)
    cut = run(make_config({"search_max_new_tokens": 1}))
    assert cut["stages"][0]["cut_share"] == 1.0 and cut["stages"][0]["mean_length"] == 1


def test_reproducible_and_independent_of_the_step_and_of_other_problems():
    config = make_config()
    result = run(config)
    assert result == run(config)
    alone = run(config, problems=PROBLEMS[2:3])
    assert alone["per_problem"][0] == result["per_problem"][2]
    other = run(config.model_copy(update={"seed": 6}))
    assert other["per_problem"] != result["per_problem"]


def test_a_grpo_run_is_evaluated_alike():
    assert run(make_config(NO_SETS, "grpo")) == run(make_config())


def test_progress_counts_every_trace():
    calls = []
    run(make_config(), progress=lambda done, total: calls.append((done, total)))
    total = 4 * (12 + 3 * 8)
    assert calls == [(i, total) for i in range(1, total + 1)]


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(PromptTooLong, match="problem 'd1', set 0: a prompt of 6 tokens"):
        run(make_config(), MaxEngine(max_context=7))


def test_result_is_json_and_is_drawn(tmp_path):
    result = run(make_config())
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    other = run(make_config(majority_at=[3, 5], rsa={"steps": 1}))
    drawn = figures({"before": result, "after": other})
    budgets = ["budget_generated", "budget_total"]
    assert list(drawn) == ["pass_at_k", "majority_at_k", "rsa", *budgets, "verification"]
    curve = drawn["pass_at_k"].axes[0].lines[0]
    assert curve.get_xdata().tolist() == [1, 4, 12]
    assert curve.get_ydata().tolist() == list(result["pass_at_k"].values())
    assert drawn["rsa"].axes[0].lines[1].get_ydata().tolist() == other["rsa"]
    for name, figure in drawn.items():
        legend = [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
        assert legend[:2] == ["before", "after"]
        assert legend[2:] == (["length", "majority", "pass (oracle)", "RSA 8/4"] if name.startswith("budget") else [])
        figure.savefig(tmp_path / f"{name}.svg")
    heights = [patch.get_height() for patch in drawn["majority_at_k"].axes[0].patches]
    assert heights == [*result["majority_at_k"].values(), *other["majority_at_k"].values()]

    console = Console(record=True, width=120)
    console.print(table({"before": result, "after": other}))
    text = console.export_text()
    low, high = other["intervals"]["rsa"][1]
    assert f"{other['rsa'][1]:.3f} [{low:.3f}, {high:.3f}]" in text and "majority@5" in text


@pytest.mark.parametrize("only_cut", [False, True])
def test_too_many_answers_that_cannot_be_graded(only_cut):
    """All of problem d3 fail: a quarter of the gradings, of the whole traces or of those cut at a limit."""

    class Failing(ExactGrader):
        def submit(self, problem, text, finish_reason):
            verdict = super().submit(problem, text, finish_reason)
            if problem.id == "d3" and (finish_reason == "length" or not only_cut):
                verdict = Future()
                verdict.set_result(Verdict(0.0, "could_not_grade", "1", "no time"))
            return verdict

    config = make_config(lengths=[1], rsa={"steps": 1})
    with pytest.raises(TooManyUngradable, match=r"problems 'd3' \((no time|cut at one of evaluate.lengths \[1\])\)"):
        evaluate(config, MaxEngine(), MaxPrompts(), Failing(), PROBLEMS, step=0)
    lenient = config.model_copy(update={"reward": config.reward.model_copy(update={"max_ungradable": 0.25})})
    result = evaluate(lenient, MaxEngine(), MaxPrompts(), Failing(), PROBLEMS, step=0)
    share = result["stages"][0]["could_not_grade_share"]
    assert share == (0 if only_cut else 0.25) and result["per_problem"][1]["lengths"]["1"] == 0
