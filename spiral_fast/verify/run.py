"""Run the checks one after the other on one subject."""

from __future__ import annotations

from collections.abc import Callable

from spiral_fast.learner.nonzero_adapter import nonzero_adapter
from spiral_fast.verify.checks import CHECKS
from spiral_fast.verify.result import FAIL, Result
from spiral_fast.verify.subject import Subject


def run_checks(subject: Subject, progress: Callable[[int, int], None]) -> dict[str, Result]:
    """The result of each of CHECKS by name. The adapter is another one meanwhile, and the old one afterwards.

    A check that raises has failed: what it says is the note.
    """
    results: dict[str, Result] = {}
    with nonzero_adapter(subject.loaded.model, seed=0):
        subject.measure()
        progress(1, 1 + len(CHECKS))
        for name, check in CHECKS.items():
            try:
                results[name] = check(subject)
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                results[name] = Result(FAIL, "could not be made", note=text[:300])
            progress(1 + len(results), 1 + len(CHECKS))
    return results
