"""traces/step_000123.parquet: every trace of a step, one row each. Any Parquet reader, or `read_traces`, reads them;
`read_rollouts` gives back the objects that were written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spiral_fast.config import ConfigError
from spiral_fast.record.files import by_step, writing, written_aside
from spiral_fast.trace import AGGREGATION, Aggregated, Problem, ProblemRollout, Trace, TraceKey

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("draw", pa.int64()),  # position in the run's order of drawn problems
        ("problem", pa.string()),
        ("outcome", pa.string()),  # of the problem: live | dead | discarded (live, but drawn after the batch was full)
        # Of the problem, on its first search trace only:
        ("question", pa.string()),
        ("answer", pa.string()),
        ("sets", pa.list_(pa.list_(pa.int32()))),  # of level 1; empty: none were drawn
        # Of the trace:
        ("prompt", pa.list_(pa.int32())),  # token ids; on the first search trace and the first of each set only
        ("level", pa.int8()),  # 0 search, 1 aggregation, above it 2, 3, ...
        ("set", pa.int32()),  # -1 for a search trace
        ("index", pa.int32()),
        ("members", pa.list_(pa.int32())),  # aggregation: the quoted traces of the level below, in the prompt's order
        ("policy_version", pa.int32()),
        ("reward", pa.float64()),  # null: not graded
        ("verdict", pa.string()),
        ("answer_found", pa.string()),  # what the grader extracted; null: nothing
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
AS_IN_TRACE = ("policy_version", "reward", "verdict", "credit", "gated", "finish_reason", "tokens", "text")


def write_traces(folder: Path, step: int, rollouts: Iterable[ProblemRollout], live_problems: int | None = None) -> Path:
    """One file, whole or absent. `rollouts` come in draw order; of the live ones the first `live_problems` (none =
    all) are the step's batch."""
    rows, n_live = [], 0
    for rollout in rollouts:
        n_live += rollout.live
        surplus = live_problems is not None and n_live > live_problems
        outcome = "dead" if not rollout.live else "discarded" if surplus else "live"
        rows += [_row(step, outcome, rollout, trace) for trace in rollout.traces()]
    path = folder / f"step_{step:06d}.parquet"
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with written_aside(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")
    return path


def read_traces(run_dir: str | Path, step: int | None = None, columns: list[str] | None = None) -> pa.Table:
    """The traces of one step, or of all steps, of a run; all columns, or the named ones. A column that an older run
    did not write is null. Raises ConfigError for a file that cannot be read."""
    folder = Path(run_dir) / "traces"
    files = [folder / f"step_{step:06d}.parquet"] if step is not None else by_step(folder, ".parquet").values()
    columns = columns or SCHEMA.names
    tables = [read_file(file, columns) for file in files]
    return pa.concat_tables([SCHEMA.empty_table().select(columns), *tables])


def read_file(path: str | Path, columns: list[str] | None = None) -> pa.Table:
    """The traces of one file. Raises ConfigError when it cannot be read."""
    try:
        return pq.read_table(path, schema=SCHEMA, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None


def read_rollouts(path: str | Path) -> list[ProblemRollout]:
    """What one file was written from, with all that credit and learner read; `Problem.data` is not kept.

    Raises ConfigError for a file that cannot be read, and for one of an older run that lacks sets and their prompts.
    """
    table = read_file(path)
    logps = [np.array(logp.values) for logp in table["logp"]]  # not by way of Python floats: the same bits
    problems: dict[int, list[tuple[dict, np.ndarray]]] = {}  # by draw
    for row, logp in zip(table.drop_columns("logp").to_pylist(), logps, strict=True):
        problems.setdefault(row["draw"], []).append((row, logp))
    return [_rollout(rows, path) for rows in problems.values()]


def _rollout(rows: list[tuple[dict, np.ndarray]], path: str | Path) -> ProblemRollout:
    first = rows[0][0]
    problem = Problem(first["problem"], first["question"], first["answer"])
    members = {1: first["sets"] or []}  # by level
    for row, _ in rows:
        if row["level"] > AGGREGATION and row["index"] == 0:
            members.setdefault(row["level"], []).append(row["members"])
    levels = [Aggregated.of(members[level], [[] for _ in members[level]]) for level in sorted(members)]
    rollout = ProblemRollout(problem, first["draw"], [], *levels[0], levels[1:])
    prompts: dict[tuple[int, int], list[int]] = {}  # by level and set
    for row, logp in rows:
        prompt = prompts.setdefault((row["level"], row["set"]), row["prompt"])
        if prompt is None or row["set"] >= len(members.get(row["level"], [0])):
            raise ConfigError(f"{path}: an older version wrote it, without the sets and their prompts; run it again")
        key = TraceKey(row["problem"], row["level"], row["set"], row["index"])
        values = {name: row[name] for name in AS_IN_TRACE}
        trace = Trace(key, list(prompt), logp=logp, answer=row["answer_found"], **values)
        (levels[key.level - 1].groups[key.set] if key.level else rollout.search).append(trace)
    return rollout


def _row(step: int, outcome: str, rollout: ProblemRollout, trace: Trace) -> dict:
    key, first = trace.key, trace is rollout.search[0]
    first_of_set = key.level >= AGGREGATION and key.index == 0
    stage = rollout.levels[key.level - 1] if key.level else None
    return {
        "step": step,
        "draw": rollout.draw,
        "problem": key.problem,
        "outcome": outcome,
        "question": rollout.problem.question if first else None,
        "answer": rollout.problem.answer if first else None,
        "sets": rollout.levels[0].members() if first else None,
        "prompt": trace.prompt if first or first_of_set else None,
        "level": key.level,
        "set": key.set,
        "index": key.index,
        "members": stage.members()[key.set] if stage else None,
        "answer_found": trace.answer,
        "prompt_length": len(trace.prompt),
        "length": len(trace.tokens),
        "logp": trace.logp,
    } | {name: getattr(trace, name) for name in AS_IN_TRACE}
