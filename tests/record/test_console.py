from __future__ import annotations

import io

from rich.console import Console as RichConsole

from spiral_fast.record import console as module
from spiral_fast.record.console import Console, step_line
from tests.record.run_of_three_steps import quiet


def test_a_terminal_gets_a_bar_while_the_phase_lasts():
    text = io.StringIO()
    with Console(RichConsole(file=text, force_terminal=True, width=100)) as console:
        report = console.progress("rollout")
        report(1, 4)
        console.bars.refresh()
        assert "rollout" in text.getvalue() and "1/4" in text.getvalue()
        report(4, 4)
        assert not console.bars.tasks
        console.progress("learn")(1, 2)  # interrupted, then begun again
        console.progress("learn")(2, 2)
        assert not console.bars.tasks


def test_without_a_terminal_only_a_long_phase_speaks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console, text = quiet()
    with console:
        report = console.progress("evaluate before")
        for done in range(1, 5):
            report(done, 5)
        assert text.getvalue() == ""
        now[0] = module.PLAIN_S
        report(3, 5)
        report(4, 5)
        now[0] = 3 * module.PLAIN_S
        report(5, 5)  # the result follows at once
    assert text.getvalue() == "  evaluate before: 3 of 5\n"


def test_a_line_is_never_markup():
    console, text = quiet()
    console.line("[bold]problem [/x] 'p[0]'")
    assert text.getvalue() == "[bold]problem [/x] 'p[0]'\n"


def test_step_line_leaves_out_what_was_not_measured():
    assert step_line(7, 160, {}) == "step   7/160"
    line = step_line(7, 160, {"reward/search": 0.25, "reward/aggregation": None, "time/step": 1.25})
    assert line == "step   7/160  search 0.250  1.2 s"
    fast = {"time/learner_tokens_per_s_computed": 6230.0, "time/learner_mfu": 0.217}
    assert step_line(7, 160, fast) == "step   7/160  learner 6,230 tok/s  MFU 22%"
