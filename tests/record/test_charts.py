from __future__ import annotations

import math

import pytest

from spiral_fast.record.charts import WINDOW, charts, running_mean
from spiral_fast.record.run_folder import read_run
from tests.record.run_of_three_steps import make_run


def test_running_mean_of_the_last_values():
    values = [float(i) for i in range(25)]
    means = running_mean(values)
    assert means[0] == 0.0 and means[1] == 0.5
    assert means[20] == pytest.approx(sum(range(20 - WINDOW + 1, 21)) / WINDOW)
    assert running_mean([math.nan, 2.0, math.nan, 4.0])[1:] == [2.0, 2.0, 3.0]
    assert math.isnan(running_mean([math.nan])[0])


@pytest.mark.parametrize("steps", [1, 50])
def test_a_chart_for_what_was_measured_and_none_for_the_rest(tmp_path, steps):
    drawn = dict(charts(read_run(make_run(tmp_path, steps))))
    assert set(drawn) == {
        "Reward by level",
        "Problems per step",
        "Gradient norm",
        "Learner against engine: log-probs of the sampled tokens",
        "Prompt tokens of the engine",
        "Time by phase",
    }
    assert all(svg.startswith("<svg") and svg.rstrip().endswith("</svg>") for svg in drawn.values())
