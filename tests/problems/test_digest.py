from __future__ import annotations

from dataclasses import replace

import pytest

from spiral_fast.problems.digest import digest
from spiral_fast.trace import Problem

PROBLEM = Problem("a", "1+1", "2", {"tolerance": 0.1})


@pytest.mark.parametrize(
    "change", [{"id": "b"}, {"question": "1 + 1"}, {"answer": "3"}, {"data": {"tolerance": 0.2}}, {"data": {}}]
)
def test_every_part_of_a_problem_counts(change):
    assert digest([PROBLEM]) == digest([replace(PROBLEM)]) != digest([replace(PROBLEM, **change)])


def test_the_order_counts():
    other = replace(PROBLEM, id="b")
    assert digest([PROBLEM, other]) != digest([other, PROBLEM])
