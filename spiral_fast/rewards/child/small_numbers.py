"""Small numbers apart: math-verify rounds decimals to six places, and to it 1.6e-19 is 9.1e-31."""

from __future__ import annotations

from typing import Any

SMALL = 1e-3  # six places of anything larger are four digits
ZERO = 1e-100  # below is what sympy computes for an expression that is zero
DIGITS = 5e-4  # relative: half of the fourth digit, at most


def too_far_apart(reference: Any, answer: Any) -> bool:
    """Whether a small number of one differs from its counterpart in the other in the first four digits.

    Both are readings of math-verify, which takes them for equal: sympy objects, or text where it is no mathematics.
    """
    pairs = zip(_numbers(reference), _numbers(answer), strict=False)
    sizes = ((abs(a - b), max(abs(a), abs(b))) for a, b in pairs)
    return any(distance > DIGITS * size for distance, size in sizes if ZERO < size < SMALL)


def _numbers(reading: Any) -> list[float]:
    """The real numbers that it is or holds as a set, an interval, a tuple, a matrix or the right side of an equation,
    ascending."""
    from sympy import Expr, MatrixBase, Set, Tuple
    from sympy.core.relational import Relational

    if isinstance(reading, (Set, Tuple, MatrixBase, Relational)):
        parts = [reading.rhs] if isinstance(reading, Relational) else getattr(reading, "flat", lambda: reading.args)()
        return sorted(number for part in parts for number in _numbers(part))
    return [float(reading.evalf())] if isinstance(reading, Expr) and reading.is_comparable else []
