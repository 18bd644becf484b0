"""Reading a run's folder, finished or stopped at any instant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spiral_fast.config import ConfigError
from spiral_fast.record.files import holds_run

CONFIG_KEYS = (  # of config.yaml, that the report reads
    "seed",
    "model.path",
    "problems.source",
    "credit.algorithm",
    "learner.steps",
    "record.logp_gap_warning",
)
EVALUATION_KEYS = (
    "problems",
    "samples",
    "pass_at_k",
    "majority_at_k",
    "rsa",
    "distinct_answers",
    "search_entropy",
    "stages",
    "intervals.level",
)


@dataclass(frozen=True)
class RunFolder:
    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]  # one per step, in order
    evaluations: dict[str, dict[str, Any]]  # by label, in the order they were made
    replayed: str | None  # whose traces, if the learner ran alone on stored ones

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
        if self.replayed is not None:
            return ""
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
    """Raises ConfigError where there is no run or a file is damaged.

    A half-written last line of metrics.jsonl is passed over.
    """
    path = Path(path)
    if not holds_run(path):
        raise ConfigError(f"{path}: holds no run (no config.yaml)")
    config = _mapping(path / "config.yaml", yaml.safe_load, CONFIG_KEYS)
    evaluations = {
        file.stem.removeprefix("eval_"): _mapping(file, json.loads, EVALUATION_KEYS)
        for file in path.glob("eval_*.json")
    }
    order = sorted(evaluations, key=lambda label: (label == "after", label != "before", label))
    environment, replay = path / "environment.json", path / "replay.json"
    return RunFolder(
        path,
        config,
        _mapping(environment, json.loads) if environment.exists() else {},
        _metrics(path / "metrics.jsonl"),
        {label: evaluations[label] for label in order},
        _mapping(replay, json.loads, ["traces"])["traces"] if replay.exists() else None,
    )


def _mapping(file: Path, parse: Callable[[str], Any], keys: Iterable[str] = ()) -> dict[str, Any]:
    """What `parse` makes of the file, which must hold `keys` (dotted)."""
    try:
        content = parse(_text(file))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: damaged ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: damaged (it holds {type(content).__name__}, not keys and values)")
    for key in keys:
        inner = content
        for part in key.split("."):
            if not isinstance(inner, dict) or part not in inner:
                raise ConfigError(f"{file}: damaged or not written by a run ({key} is missing)")
            inner = inner[part]
    return content


def _metrics(file: Path) -> list[dict[str, Any]]:
    lines = _text(file).splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ConfigError(f"{file}, line {number}: not JSON") from None
            continue
        if not isinstance(rows[-1], dict) or "step" not in rows[-1]:
            raise ConfigError(f"{file}, line {number}: not the metrics of a step")
    return rows


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
