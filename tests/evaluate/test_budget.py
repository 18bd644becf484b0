"""What each method costs, by hand, and its accuracy from the metric it belongs to."""

from __future__ import annotations

import numpy as np
import pytest

from spiral_fast.evaluate.budget import Cost, costs
from spiral_fast.evaluate.sampling import ProblemSamples
from spiral_fast.evaluate.stage import Sample
from spiral_fast.trace import TraceKey
from tests.evaluate.test_run import PROBLEMS, make_config, run


def sample(length: int, prompt: int, computed: int) -> Sample:
    key = TraceKey("d1", 0, -1, 0)
    return Sample(key, [], [1] * length, "", 0.0, "stop", prompt, prompt - computed, computed, "1", "wrong", "", [])


def test_costs_by_hand():
    """Lengths 1, 2, 3, 3; the prompt of 10 is computed once, and twice more after an eviction (trace 3)."""
    search = [sample(1, 10, 10), sample(2, 10, 0), sample(3, 10, 0), sample(3, 10, 10)]
    steps = [[sample(2, 30, 20), sample(4, 34, 24)], [sample(1, 32, 12), sample(1, 30, 30)]]
    config = make_config(
        samples=4, pass_at=[1, 4], majority_at=[2], lengths=[2], rsa={"population": 2, "set_size": 2, "steps": 2}
    )
    assert list(costs(ProblemSamples(PROBLEMS[0], search, [steps]), config)) == [
        Cost("length", 2, (1 + 2 + 2 + 2) / 4, 10, 10),
        Cost("length", 3, (1 + 2 + 3 + 3) / 4, 10, 10),
        Cost("majority", 2, 2 * 9 / 4, 20, 10),
        Cost("pass (oracle)", 1, 9 / 4, 10, 10),
        Cost("pass (oracle)", 4, 9, 40, 20),
        Cost("RSA 2/2", 1, (1 + 2) + (2 + 4) / 2, 20 + (30 + 34) / 2, 10 + (20 + 24) / 2),
        Cost("RSA 2/2", 2, (1 + 2) + (2 + 4) + 1, 20 + 64 + 31, 10 + 44 + 21),
    ]


def test_the_paper_s_smallest_budgets():
    """Section 4: traces of 4k tokens, RSA 8/4 begins at 36k; majority of 4 traces of 16k at 64k."""
    k = 1000
    search, aggregation = [sample(4 * k, 1, 1)] * 8, [sample(4 * k, 1, 1)] * 8
    config = make_config(samples=8, pass_at=[1], majority_at=[4], rsa={"steps": 1})
    found = {(c.method, c.at): c.generated for c in costs(ProblemSamples(PROBLEMS[0], search, [[aggregation]]), config)}
    assert found["RSA 8/4", 1] == 36 * k
    long = ProblemSamples(PROBLEMS[0], [sample(16 * k, 1, 1)] * 8, [[aggregation]])
    assert next(c.generated for c in costs(long, config) if c.method == "majority") == 64 * k


def test_accuracies_are_those_of_the_metrics():
    shapes = [{"population": 8, "set_size": 4, "steps": 2}, {"population": 4, "set_size": 2, "steps": 1}]
    result = run(make_config(lengths=[1], rsa=shapes))
    points = {(point["method"], point["at"]): point for point in result["budget"]}
    for k, value in result["pass_at_k"].items():
        assert points["pass (oracle)", int(k)]["accuracy"] == value
        assert points["pass (oracle)", int(k)]["interval"] == result["intervals"]["pass_at_k"][k]
    assert points["majority", 3]["accuracy"] == result["majority_at_k"]["3"]
    assert points["length", 1]["accuracy"] == result["lengths"]["1"]
    assert points["length", 3]["accuracy"] == pytest.approx(result["pass_at_k"]["1"])
    assert points["RSA 4/2", 1]["accuracy"] == result["rsa_shapes"][1]["rsa"][1]
    assert ("RSA 8/4", 0) not in points and len(points) == 2 + 2 + 3 + 2 + 1
    assert points["RSA 8/4", 2]["generated"] == 2 * (8 + 8 + 1)
    assert points["RSA 8/4", 2]["prompt"] == 8 * 2 + 8 * 6 + 6 == points["RSA 8/4", 2]["computed"]  # no cache there
    assert np.isfinite([point[k] for point in result["budget"] for k in ("generated", "prompt", "computed")]).all()
