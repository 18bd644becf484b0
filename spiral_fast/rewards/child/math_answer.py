"""A mathematical answer against the reference, by math-verify."""

from __future__ import annotations

import functools
import re
import sys

from spiral_fast.rewards.child.normalise import normalise, without_unit
from spiral_fast.rewards.child.small_numbers import too_far_apart


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


WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname)\{([^{}]*)\}")
WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
BASE = re.compile(r"[0-9A-F]+_\{?(\d+)\}?")
COLUMN = re.compile(r"\\begin\{([pb]?matrix)\}([^&]*?)\\end\{\1\}")


def math_reward(reference: str, answer: str) -> dict:
    """{"reward": 1.0 or 0.0}, or {"reason"}: an unreadable answer is wrong, an unreadable reference is not graded."""
    with Breakdown() as breakdown:
        gold = parse(normalise(reference))
        correct = bool(gold) and same(normalise(reference), normalise(answer))
    if correct:
        return {"reward": 1.0}
    if breakdown.seen:
        return {"reason": f"{breakdown.seen} while comparing {answer[:80]!r}"}
    if not gold:
        return {"reason": f"the reference answer {reference[:80]!r} cannot be parsed"}
    return {"reward": 0.0}


def same(reference: str, answer: str) -> bool:
    """Whether two normalised answers mean the same. Not symmetric: an inequality is no answer to an interval."""
    words = [WORDS.fullmatch(WRAPPED.sub(r"\1", text).strip()) for text in (reference, answer)]
    if all(words):  # to math-verify a word is the product of its letters, and "east" would be "seat"
        return words[0].group().casefold() == words[1].group().casefold()
    bases = [BASE.fullmatch(text) for text in (reference, answer)]
    if all(bases) and bases[0].group(1) != bases[1].group(1):  # math-verify leaves them out
        return False
    if ("matrix}" in reference) != ("matrix}" in answer):  # a column against (1, 2)
        reference, answer = (COLUMN.sub(_tuple, text) for text in (reference, answer))
    if equal(reference, answer):
        return True
    bare = [text.removesuffix("%").removesuffix("\\").strip() for text in (reference, answer)]
    if reference.endswith("%") != answer.endswith("%"):  # the percent sign may be left out
        return equal(*bare)
    bare = [_number_alone(text) for text in (reference, answer)]
    return bare != [reference, answer] and equal(*bare)


def equal(reference: str, answer: str) -> bool:
    from math_verify import verify

    gold, found = parse(reference), parse(answer)
    return verify(gold, found, timeout_seconds=None) and (reference == answer or not too_far_apart(gold[0], found[0]))


@functools.lru_cache(256)  # many answers to one reference follow each other
def parse(text: str) -> list:
    """math-verify's reading of the content of a box: [expression, string], [string] if it is no mathematics, or []."""
    from math_verify import LatexExtractionConfig, parse

    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)


def _number_alone(text: str) -> str:
    r"""Without the words after a number, which may stand in one \text with it; any other text as it is."""
    plain = WRAPPED.sub(r"\1", text)
    number = without_unit(plain)
    return text if number == plain else number


def _tuple(column: re.Match) -> str:
    return "(" + ",".join(column.group(2).split("\\\\")) + ")"
