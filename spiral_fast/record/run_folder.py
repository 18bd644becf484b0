"""Reading a run's folder, finished or stopped at any instant."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spiral_fast.config import ConfigError
from spiral_fast.record.files import holds_run


@dataclass(frozen=True)
class RunFolder:
    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]  # one per step, in order
    evaluations: dict[str, dict[str, Any]]  # by label, in the order they were made

    @property
    def steps(self) -> int:
        """Optimiser steps the run was to make."""
        return self.config["learner"]["steps"]

    @property
    def steps_done(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def incomplete(self) -> str:
        """What a finished run would hold and this one does not; empty for a finished run."""
        lacking = []
        if self.steps_done < self.steps:
            lacking.append(f"it made {self.steps_done} of {self.steps} steps")
        lacking += [
            f"the evaluation {label} is missing" for label in ("before", "after") if label not in self.evaluations
        ]
        return "; ".join(lacking)

    def series(self, key: str) -> list[float]:
        """One metric over the steps, NaN where a step lacks it."""
        values = (row.get(key) for row in self.metrics)
        return [float("nan") if value is None else float(value) for value in values]


def read_run(path: str | Path) -> RunFolder:
    """Raises ConfigError where there is no run. A half-written last line of metrics.jsonl is passed over."""
    path = Path(path)
    if not holds_run(path):
        raise ConfigError(f"{path}: holds no run (no config.yaml)")
    config = yaml.safe_load((path / "config.yaml").read_text())
    evaluations = {file.stem.removeprefix("eval_"): json.loads(file.read_text()) for file in path.glob("eval_*.json")}
    order = sorted(evaluations, key=lambda label: (label == "after", label != "before", label))
    environment = path / "environment.json"
    return RunFolder(
        path,
        config,
        json.loads(environment.read_text()) if environment.exists() else {},
        _metrics(path / "metrics.jsonl"),
        {label: evaluations[label] for label in order},
    )


def _metrics(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ConfigError(f"{file}, line {number}: not JSON") from None
    return rows
