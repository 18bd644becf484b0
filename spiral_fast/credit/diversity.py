"""How diverse a set of search traces is: the factor d(G) of `poly_epo`. `credit.diversity` names the function."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isfinite
from numbers import Rational, Real

from spiral_fast.by_name import CannotLoad, find_function, first_line
from spiral_fast.config import ConfigError
from spiral_fast.trace import ProblemRollout

# (extracted answer of each trace of a set, None where there is none; its text) -> d(G). A rational number (int,
# Fraction) keeps zero credits exact.
Diversity = Callable[[list[str | None], list[str]], float | Fraction]


def distinct_answers(answers: list[str | None], texts: list[str]) -> Fraction:
    """Distinct answers / set size. Traces without an answer add none: saying nothing is no way of being different."""
    return Fraction(len(set(answers) - {None}), len(answers))


def load_diversity(name: str) -> Diversity:
    """`distinct_answers`, or a function of the user's. Raises ConfigError for one that cannot be loaded."""
    if name == "distinct_answers":
        return distinct_answers
    try:
        return find_function(name, ("answers", "texts"))
    except CannotLoad as error:
        raise ConfigError(f"credit.diversity: {name!r} cannot be used: {error}") from None


def set_diversities(rollout: ProblemRollout, diversity: Diversity) -> list[Rational | float]:
    """d(G) of each of the problem's sets. Raises ConfigError where the function fails or gives no finite number."""
    values = []
    for k, members in enumerate(rollout.sets):
        traces = [rollout.search[i] for i in members]
        which = f"set {k} of problem {rollout.problem.id!r}"
        try:
            value = diversity([trace.answer for trace in traces], [trace.text for trace in traces])
        except (Exception, SystemExit) as error:
            raise ConfigError(f"credit.diversity: fails on {which}: {first_line(error)}") from error
        if not _is_finite(value):
            shown = repr(value)
            shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
            raise ConfigError(f"credit.diversity: {shown} for {which}: a finite number is needed")
        values.append(value if isinstance(value, Rational) else float(value))
    return values


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False
