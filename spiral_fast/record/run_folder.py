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
    config = mapping_of(path / "config.yaml", yaml.safe_load, CONFIG_KEYS)
    evaluations = {
        file.stem.removeprefix("eval_"): mapping_of(file, json.loads, EVALUATION_KEYS)
        for file in path.glob("eval_*.json")
    }
    order = sorted(evaluations, key=lambda label: (label == "after", label != "before", label))
    environment, replay = path / "environment.json", path / "replay.json"
    return RunFolder(
        path,
        config,
        mapping_of(environment, json.loads) if environment.exists() else {},
        [row for row, _ in read_metrics(path / "metrics.jsonl")],
        {label: evaluations[label] for label in order},
        mapping_of(replay, json.loads, ["traces"])["traces"] if replay.exists() else None,
    )


def mapping_of(file: Path, parse: Callable[[str], Any], keys: Iterable[str] = ()) -> dict[str, Any]:
    """What `parse` makes of the file, which must hold `keys` (dotted). Raises ConfigError."""
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
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


def read_metrics(file: Path) -> list[tuple[dict[str, Any], int]]:
    """(metrics, offset of the line's end in bytes) of each step, in order; a half-written last line is passed over.

    Raises ConfigError naming the line where one is damaged or a step is missing.
    """
    try:
        lines = file.read_bytes().split(b"\n") if file.exists() else []
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    found: list[tuple[dict[str, Any], int]] = []
    end = 0
    for number, line in enumerate(lines, 1):
        if number == len(lines):  # nothing follows a line's end, half a line has none
            break
        end += len(line) + 1
        try:
            row = json.loads(line)
        except ValueError:
            if not any(lines[number:]):  # the machine's end may leave zeros
                break
            raise ConfigError(f"{file}, line {number}: not JSON") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ConfigError(f"{file}, line {number}: not the metrics of a step")
        if found and row["step"] != found[-1][0]["step"] + 1:
            raise ConfigError(f"{file}, line {number}: step {row['step']} follows step {found[-1][0]['step']}")
        found.append((row, end))
    return found
