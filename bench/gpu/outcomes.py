"""A pytest plugin: one JSON line per test in the file that the variable TEST_OUTCOMES names, as soon as it is known."""

from __future__ import annotations

import json
import os


def pytest_runtest_logreport(report) -> None:
    """A test that is skipped or breaks in its setup has no call. Of pytest-xdist only the controller writes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            line["why"] = str(report.longrepr)[-2000:]
        with open(os.environ["TEST_OUTCOMES"], "a") as file:
            file.write(json.dumps(line) + "\n")
