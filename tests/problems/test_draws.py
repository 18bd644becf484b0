from __future__ import annotations

import pytest

from spiral_fast.problems import Draws


def test_each_epoch_is_a_permutation_and_a_new_one():
    draws = Draws(50, seed=1)
    epochs = [[draws[50 * epoch + place] for place in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_draw_depends_on_seed_and_index_only():
    straight = [Draws(13, seed=7)[draw] for draw in range(100)]
    draws = Draws(13, seed=7)
    assert [draws[draw] for draw in reversed(range(100))] == straight[::-1]
    assert [Draws(13, seed=8)[draw] for draw in range(100)] != straight


def test_the_order_is_pinned():
    """A resumed run must draw what the interrupted one would have drawn, also after an upgrade of Python."""
    draws = Draws(8, seed=0)
    assert [draws[draw] for draw in range(16)] == PINNED


PINNED = [5, 6, 2, 0, 7, 3, 4, 1, 4, 2, 0, 6, 7, 1, 5, 3]


def test_without_shuffle_the_file_order_repeats():
    draws = Draws(3, seed=0, shuffle=False)
    assert [draws[draw] for draw in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_refusals():
    with pytest.raises(ValueError, match="no training problem"):
        Draws(0, seed=0)
    with pytest.raises(IndexError):
        Draws(3, seed=0)[-1]
