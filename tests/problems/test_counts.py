from __future__ import annotations

from spiral_fast.problems.counts import count_lines, counts_in_a_line

COUNTS = {"rows read": 53291, "taken out: not level >= 2": 843, "train": 52418, "eval": 30}


def test_lines():
    assert count_lines(COUNTS) == [
        "53,291  rows read",
        "   843  taken out: not level >= 2",
        "52,418  train",
        "    30  eval",
    ]


def test_one_line():
    said = "problems: 53,291 rows read; 843 taken out: not level >= 2; 52,418 train; 30 eval"
    assert counts_in_a_line(COUNTS) == said
