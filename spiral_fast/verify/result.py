"""The outcome of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "not applicable"


@dataclass(frozen=True)
class Result:
    status: str  # PASS | FAIL | NOT_APPLICABLE
    figure: str = ""  # what was measured, with its unit
    tolerance: str = ""  # what it had to keep
    note: str = ""  # on what it was measured, what was shortened, what is wrong, why it does not apply
    values: dict[str, float] = field(default_factory=dict)  # the measured numbers, for --json

    def as_json(self, check: str) -> dict:
        return {"check": check} | asdict(self)


def within(value: float, limit: float, figure: str, note: str, **values: float) -> Result:
    """Pass when `value` (not NaN) is at most `limit`; figure: with a place `{}` for the value."""
    return Result(PASS if value <= limit else FAIL, figure.format(f"{value:.2g}"), f"<= {limit:g}", note, values)


def not_applicable(reason: str) -> Result:
    return Result(NOT_APPLICABLE, note=reason)
