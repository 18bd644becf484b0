from __future__ import annotations

import pytest

from spiral_fast.rewards.boxed import last_box


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("so \\boxed{7}", "7"),
        ("\\boxed{6}, no: \\boxed{7}.", "7"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{x\\right.}", "\\left\\{x\\right."),
        ("\\boxed {7}", "7"),
        ("\\boxed{ 7\n}", "7"),
        ("\\boxed{}", ""),
        ("stray } and { before \\boxed{7}", "7"),
        ("\\boxed{x = \\boxed{5}}", "5"),  # of nested boxes the inner one
        ("\\boxed{6} then \\boxed{7", "6"),  # cut off: the last box that is closed
        ("{\\boxed{6}} {7}", "6"),
        ("\\boxed{a\\\\}", "a\\\\"),  # a line break, then the closing brace
        ("\\boxed{7", None),
        ("\\boxed 7", None),
        ("7", None),
        ("", None),
    ],
)
def test_last_closed_box_with_nested_braces(text, box):
    assert last_box(text) == box


def test_many_open_boxes_take_linear_time():
    assert last_box("\\boxed{" * 200_000) is None  # would take minutes if each were scanned to the end
    assert last_box("\\boxed{" * 100_000 + "7" + "}" * 100_000) == "7"
