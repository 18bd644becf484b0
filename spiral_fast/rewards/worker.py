"""The process that runs math-verify: one JSON line [reference, answer] in, one JSON line [verdict, reason] out.

Started by rewards/math.py as a plain file, so that it imports nothing but math-verify. It reads until its standard
input closes, which is also how it ends when its parent dies; a limit on CPU seconds ends it when that happens inside an
endless computation.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys


def limit(memory_mb: int, timeout_s: float) -> None:
    """Allow the next grading `memory_mb` above what the process holds now, and CPU time well above its deadline.

    Only Linux limits memory: elsewhere a grading that eats it ends at its deadline.
    """
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        set_soft(resource.RLIMIT_AS, size + memory_mb * 2**20)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    set_soft(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + timeout_s) + 2)


def set_soft(kind: int, wanted: int) -> None:
    """The soft limit becomes `wanted`, or the hard limit where that is lower: only root may raise a hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


class Breakdown:
    """Whether memory or the stack ran out while it traces: math-verify and sympy catch that and go on with "not equal".

    Costs a factor of two in grading time.
    """

    seen = ""

    def __enter__(self) -> Breakdown:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(None)

    def _call(self, frame, event, argument):
        frame.f_trace_lines = False
        return self._inside

    def _inside(self, frame, event, argument):
        if event == "exception" and issubclass(argument[0], (MemoryError, RecursionError)):
            self.seen = argument[0].__name__
        return self._inside


def grade(reference: str, answer: str, breakdown: Breakdown) -> tuple[str, str]:
    """(verdict, reason). An unreadable answer is wrong; an unreadable reference or a breakdown is not graded."""
    from math_verify import verify

    with breakdown:
        gold = parse(reference)
        correct = bool(gold) and verify(gold, parse(answer), timeout_seconds=None)
    if correct:
        return "correct", ""
    if breakdown.seen:
        return "could_not_grade", f"{breakdown.seen} while comparing {answer[:80]!r}"
    if not gold:
        return "could_not_grade", f"the reference answer {reference[:80]!r} cannot be parsed"
    return "wrong", ""


def parse(text: str) -> list:
    """math-verify's reading of the content of a box: [expression, string], [string] if it is no mathematics, or []."""
    from math_verify import LatexExtractionConfig, parse

    text = text.strip()
    text = text.removesuffix("." if not text.endswith("right.") else "")  # a full stop
    if text.startswith("**") and text.endswith("**"):  # markdown bold
        text = text[2:-2]
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)


def main(memory_mb: int, timeout_s: float) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    logging.disable(logging.CRITICAL)
    grade("\\frac{1}{2}", "0.5 + x", Breakdown())  # imports and builds the parser before the first deadline runs
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        reference, answer = json.loads(line)
        limit(memory_mb, timeout_s)
        breakdown = Breakdown()
        print(json.dumps(grade(reference, answer, breakdown)), file=replies, flush=True)
        if breakdown.seen:  # whoever asks next starts a fresh process
            break


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
