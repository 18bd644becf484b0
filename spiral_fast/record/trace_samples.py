"""A few traces of one problem for a reader: the last recorded step's first live problem."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spiral_fast.record.files import by_step
from spiral_fast.record.trace_store import SCHEMA, read_traces

TOKENS = ("prompt", "tokens", "logp")  # large columns nobody reads by eye


@dataclass(frozen=True)
class SampleTrace:
    name: str
    verdict: str | None
    reward: float | None
    credit: float
    gated: bool
    length: int
    finish_reason: str
    text: str


@dataclass(frozen=True)
class Samples:
    step: int
    problem: str
    question: str
    answer: str
    traces: list[SampleTrace]


def sample_traces(run_dir: Path) -> Samples | None:
    """The first set of that problem's top level: its members, then its aggregations (without sets: the first traces).

    Raises ConfigError for a file that cannot be read.
    """
    step = max(by_step(run_dir / "traces", ".parquet"), default=None)
    if step is None:
        return None
    rows = read_traces(run_dir, step, [name for name in SCHEMA.names if name not in TOKENS]).to_pylist()
    if not rows:
        return None
    live = [row["draw"] for row in rows if row["credit"] != 0]
    draw = min(live, default=rows[0]["draw"])
    rows = [row for row in rows if row["draw"] == draw]
    top = max(row["level"] for row in rows)
    aggregations = [row for row in rows if row["set"] == 0 and row["level"] == top]
    members = aggregations[0]["members"] if aggregations else range(4)
    below = [row for row in rows if row["level"] == max(0, top - 1)]
    shown = [below[i] for i in members if i < len(below)] + aggregations[:4]
    return Samples(step, rows[0]["problem"], rows[0]["question"], rows[0]["answer"], [_sample(row) for row in shown])


def _sample(row: dict) -> SampleTrace:
    if row["level"] == 0:
        name = f"search trace {row['index']}"
    else:
        quoted = ", ".join(map(str, row["members"]))
        below = "search traces" if row["level"] == 1 else f"traces of level {row['level'] - 1}:"
        level = "" if row["level"] == 1 else f"level {row['level']}: "
        name = f"{level}aggregation {row['index']} of set {row['set']} ({below} {quoted})"
    kept = ("verdict", "reward", "credit", "gated", "length", "finish_reason", "text")
    return SampleTrace(name, *(row[key] for key in kept))
