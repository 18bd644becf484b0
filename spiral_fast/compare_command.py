"""`spiral-fast compare`: evaluations laid over each other on one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spiral_fast.config import ConfigError


def compare_evaluations(texts: Sequence[str], out: Path) -> None:
    """Write the page of `LABEL=eval.json` files to `out`; the first is what the others are compared with."""
    from spiral_fast.evaluate.compare import check_comparable, comparison_page
    from spiral_fast.record.files import refuse_unwritable, written_aside

    evaluations: dict[str, dict] = {}
    for text in texts:
        label, equals, file = text.partition("=")
        if not (label and equals and file):
            raise ConfigError(f"{text!r} is not of the form LABEL=eval.json")
        if label in evaluations:
            raise ConfigError(f"the label {label!r} is given twice")
        evaluations[label] = _read(Path(file))
    check_comparable(evaluations)
    refuse_unwritable("--out", out.parent, longest_name=f".{out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(out) as aside:
        aside.write_text(comparison_page(evaluations), encoding="utf-8")


def _read(file: Path) -> dict:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not isinstance(found, dict) or "per_problem" not in found or "pass_at_k" not in found:
        raise ConfigError(f"{file}: is not what spiral-fast eval writes")
    return found
