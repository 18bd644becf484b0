from __future__ import annotations

from tests.faults.summary import Fault, write


def test_rows_of_this_run_replace_those_of_an_earlier_one(tmp_path):
    write([Fault("a", "stops", "error: x", 1.0, None), Fault("b", "goes on", "lost", 2.0, 30.0, 40.0)], tmp_path)
    write([Fault("b", "goes on", "lost again", 3.0, 30.0, 41.0)], tmp_path)
    page = (tmp_path / "faults.md").read_text()
    assert "| a | stops | 1.0 |  |  | `error: x` |" in page
    assert "| b | goes on | 3.0 | 30 | 41.0 | `lost again` |" in page and page.count("| b |") == 1
    assert "sglang " in page and "torch " in page
