from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from spiral_fast.evaluate.bootstrap import bootstrap_interval, bootstrap_ratio
from spiral_fast.evaluate.stage import Sample
from spiral_fast.evaluate.verification import candidate_counts, verification
from spiral_fast.trace import TraceKey
from tests.evaluate.test_run import make_config, run


def sample(answer: str | None, correct: bool, members=()) -> Sample:
    verdict = "correct" if correct else "wrong"
    key = TraceKey("p", 1 if members else 0, 0, 0)
    return Sample(key, list(members), [1], "", -1.0, "stop", 3, 0, 3, answer, verdict, "", [])


POPULATION = [sample("a", True), sample("b", True), sample("c", False), sample(None, False), sample("c", False)]


def test_one_aggregation_of_each_kind():
    for answer, correct, kind in (("a", True, 2), ("c", False, 3), ("d", True, 4), ("d", False, 4), (None, False, 5)):
        counts = candidate_counts(POPULATION, [sample(answer, correct, (0, 2))], 2)
        expected = np.zeros((3, 6))
        expected[1, [0, kind]] = 1
        expected[1, 1] = correct
        assert np.array_equal(counts, expected)
    fresh = candidate_counts(POPULATION, [sample("b", True, (2, 3)), sample("c", False, (2, 3))], 2)
    assert fresh[0].tolist() == [2, 1, 0, 1, 1, 0]  # b is right, but nobody in this set said it


def test_picking_a_candidate_at_random_scores_the_chance_level():
    """All sets of 3 of the population times all three picks: an exact expectation."""
    aggregations = [
        sample(POPULATION[members[pick]].answer or "none", POPULATION[members[pick]].correct, members)
        for members, pick in product(combinations(range(5), 3), range(3))
    ]
    named = [POPULATION[i] if POPULATION[i].answer else sample("none", False) for i in range(5)]
    found = verification(candidate_counts(named, aggregations, 3)[None], 50, 0)["mixed"]
    mixed = [m for m in combinations(range(5), 3) if 0 < sum(i < 2 for i in m) < 3]
    chance = np.mean([sum(i < 2 for i in m) / 3 for m in mixed])
    assert found["chance"]["share"] == pytest.approx(chance) and found["aggregations"] == 3 * len(mixed)
    for key in ("picks_right", "right_of_picked", "correct"):
        assert found[key]["share"] == pytest.approx(chance)
    assert found["picks_wrong"]["share"] == pytest.approx(1 - chance) and found["new_answer"]["share"] == 0


def test_shares_against_a_plain_recount():
    """Random populations of 30 problems, counted again trace by trace."""
    rng = np.random.default_rng(0)
    truth = {"a", "b"}
    counts, rows = [], []
    for p in range(30):
        names = rng.choice(["a", "b", "c", "d", ""], 6, p=rng.dirichlet(np.ones(5)))
        population = [sample(str(n) or None, n in truth) for n in names]
        aggregations = []
        for _ in range(int(rng.integers(1, 9))):
            members = sorted(rng.choice(6, 4, replace=False).tolist())
            answer = str(rng.choice(["a", "b", "c", "e", ""])) or None
            aggregations.append(sample(answer, answer in truth, members))
            quoted = [names[i] or None for i in members]
            rows.append((p, sum(n in truth for n in quoted), answer, quoted))
        counts.append(candidate_counts(population, aggregations, 4))
    counts = np.array(counts)
    found = verification(counts, 300, 3)
    for r, cell in enumerate(found["by_right_candidates"]):
        here = [row for row in rows if row[1] == r]
        assert cell["right"] == r and cell["aggregations"] == len(here) == cell["correct"]["of"]
        assert cell["problems"] == len({row[0] for row in here}) and cell["few"] == (cell["problems"] < 10)
        assert cell["correct"]["share"] == pytest.approx(np.mean([row[2] in truth for row in here]))
    mixed = [row for row in rows if 0 < row[1] < 4]
    repeats = [row for row in mixed if row[2] and row[2] in row[3]]
    assert found["mixed"]["picks_right"]["share"] == pytest.approx(sum(r[2] in truth for r in repeats) / len(mixed))
    assert found["mixed"]["right_of_picked"]["of"] == len(repeats) < len(mixed) == found["mixed"]["correct"]["of"]
    wrong = [row for row in rows if row[1] == 0]
    new = [row for row in wrong if row[2] and row[2] not in row[3]]
    assert found["all_wrong"]["new_answer"]["share"] == pytest.approx(len(new) / len(wrong))
    assert found["all_wrong"]["correct"]["share"] == pytest.approx(sum(r[2] in truth for r in new) / len(wrong))
    shares = [found["mixed"][k]["share"] for k in ("picks_right", "picks_wrong", "new_answer", "no_answer")]
    assert sum(shares) == pytest.approx(1)
    hits, of = counts[:, 1:4, 2].sum(1), counts[:, 1:4, 0].sum(1)
    assert found["mixed"]["picks_right"]["interval"] == bootstrap_ratio(hits, of, 300, 3)


def test_a_cell_without_aggregations_has_no_share():
    found = verification(candidate_counts(POPULATION, [sample("a", True, (0, 1))], 2)[None], 50, 0)
    assert found["mixed"]["correct"] == {"share": None, "of": 0, "interval": None} and found["mixed"]["few"]
    assert found["by_right_candidates"][2]["correct"] == {"share": 1.0, "of": 1, "interval": [1.0, 1.0]}


def test_ratio_interval():
    """Equal counts: the interval of the mean. Unequal ones: a resample by hand. Empty resamples are left out."""
    rng = np.random.default_rng(1)
    hits, counts = rng.integers(0, 5, 40), np.full(40, 4)
    assert bootstrap_ratio(hits, counts, 200, 7) == pytest.approx(bootstrap_interval(hits / 4, 200, 7))
    counts = rng.integers(0, 9, 40)
    hits = rng.binomial(counts, 0.4)
    chosen = np.random.default_rng(7).integers(40, size=(200, 40))
    ratios = [hits[c].sum() / counts[c].sum() for c in chosen]
    assert bootstrap_ratio(hits, counts, 200, 7) == pytest.approx(np.quantile(ratios, [0.025, 0.975]).tolist())
    one = np.array([0, 0, 0, 1])
    assert bootstrap_ratio(one, one, 200, 0) == [1.0, 1.0] and bootstrap_ratio(0 * one, 0 * one, 200, 0) is None


def test_the_max_game():
    """It says its candidates' largest digit: right iff one of them is, never a new answer."""
    found = run(make_config(rsa={"steps": 2, "population": 8, "set_size": 3}))["rsa_shapes"][0]["verification"]
    for part in found.values():
        cells = part["by_right_candidates"]
        assert [cell["correct"]["share"] for cell in cells] == [0.0] + [
            1.0 if c["aggregations"] else None for c in cells[1:]
        ]
        assert part["mixed"]["right_of_picked"]["share"] == 1.0 > part["mixed"]["chance"]["share"] > 0
        assert part["all_wrong"]["new_answer"]["share"] == 0.0
    counted = [sum(c["aggregations"] for c in part["by_right_candidates"]) for part in found.values()]
    assert counted == [4 * 8, 4 * 8 * 2]
