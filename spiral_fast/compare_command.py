"""`spiral-fast compare`: evaluations laid over each other on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spiral_fast.config import ConfigError


def compare_evaluations(texts: Sequence[str], out: Path) -> None:
    """Write the page of `LABEL=eval.json` files to `out`; the first is what the others are compared with."""
    from spiral_fast.evaluate.compare import check_comparable, comparison_page
    from spiral_fast.evaluate.read import read_evaluation
    from spiral_fast.record.files import refuse_unwritable, written_aside

    if out.is_dir():
        raise ConfigError(f"--out: {str(out)!r} is a folder; name a file")
    evaluations: dict[str, dict] = {}
    for text in texts:
        label, equals, file = text.partition("=")
        if not (label and equals and file):
            raise ConfigError(f"{text!r} is not of the form LABEL=eval.json")
        if label in evaluations:
            raise ConfigError(f"the label {label!r} is given twice")
        evaluations[label] = read_evaluation(Path(file))
        if out.exists() and out.samefile(file):
            raise ConfigError(f"--out: {str(out)!r} is one of the evaluations; choose another --out")
    check_comparable(evaluations)
    refuse_unwritable("--out", out.parent, longest_name=f".{out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(out) as aside:
        aside.write_text(comparison_page(evaluations), encoding="utf-8")
