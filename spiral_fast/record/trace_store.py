"""traces/step_000123.parquet: every trace of a step, one row each. Any Parquet reader, or `read_traces`, reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spiral_fast.record.files import writing, written_aside
from spiral_fast.trace import ProblemRollout, Trace

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("draw", pa.int64()),  # position in the run's order of drawn problems
        ("problem", pa.string()),
        ("question", pa.string()),  # with answer and prompt on a problem's first search trace only
        ("answer", pa.string()),
        ("prompt", pa.list_(pa.int32())),  # token ids; an aggregation's prompt is told by its members
        ("level", pa.int8()),  # 0 search, 1 aggregation
        ("set", pa.int32()),  # -1 for a search trace
        ("index", pa.int32()),
        ("members", pa.list_(pa.int32())),  # aggregation: the quoted search traces, in the prompt's order
        ("policy_version", pa.int32()),
        ("reward", pa.float64()),  # null: not graded
        ("verdict", pa.string()),
        ("credit", pa.float64()),  # after the gate
        ("gated", pa.bool_()),
        ("finish_reason", pa.string()),
        ("prompt_length", pa.int32()),
        ("length", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("logp", pa.list_(pa.float32())),
        ("text", pa.string()),
    ]
)


def write_traces(folder: Path, step: int, rollouts: Iterable[ProblemRollout]) -> Path:
    """One file, whole or absent; no prompt is stored twice."""
    rows = [_row(step, rollout, trace) for rollout in rollouts for trace in rollout.traces()]
    path = folder / f"step_{step:06d}.parquet"
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with written_aside(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")
    return path


def read_traces(run_dir: str | Path, step: int | None = None, columns: list[str] | None = None) -> pa.Table:
    """The traces of one step, or of all steps, of a run; all columns, or the named ones."""
    folder = Path(run_dir) / "traces"
    files = [folder / f"step_{step:06d}.parquet"] if step is not None else sorted(folder.glob("step_*.parquet"))
    columns = columns or SCHEMA.names
    tables = [pq.read_table(file, schema=SCHEMA, columns=columns) for file in files]
    return pa.concat_tables([SCHEMA.empty_table().select(columns), *tables])


def _row(step: int, rollout: ProblemRollout, trace: Trace) -> dict:
    key, first = trace.key, trace is rollout.search[0]
    return {
        "step": step,
        "draw": rollout.draw,
        "problem": key.problem,
        "question": rollout.problem.question if first else None,
        "answer": rollout.problem.answer if first else None,
        "prompt": trace.prompt if first else None,
        "level": key.level,
        "set": key.set,
        "index": key.index,
        "members": rollout.sets[key.set].tolist() if key.set >= 0 else None,
        "policy_version": trace.policy_version,
        "reward": trace.reward,
        "verdict": trace.verdict,
        "credit": trace.credit,
        "gated": trace.gated,
        "finish_reason": trace.finish_reason,
        "prompt_length": len(trace.prompt),
        "length": len(trace.tokens),
        "tokens": trace.tokens,
        "logp": trace.logp,
        "text": trace.text,
    }
