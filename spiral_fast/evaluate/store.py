"""The traces of an evaluation on disk, a Parquet file per chunk of problems: what resuming, shards and readers need.

`<out's stem>_traces/` beside the numbers holds identity.json, which says what was evaluated, and chunk_000000.parquet
and so on, each whole or absent. Any Parquet reader, or `read_chunk`, reads them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spiral_fast.by_name import first_line
from spiral_fast.config import Config, ConfigError
from spiral_fast.evaluate.sampling import ProblemSamples
from spiral_fast.evaluate.stage import Sample
from spiral_fast.learner.roles import ADAPTERS, WEIGHTS, adapter_folders
from spiral_fast.problems.digest import digest
from spiral_fast.record.files import write_json, writing, written_aside
from spiral_fast.trace import SEARCH, Problem, TraceKey

SCHEMA = pa.schema(
    [
        ("problem", pa.string()),
        ("question", pa.string()),  # with reference on a problem's first search trace only
        ("reference", pa.string()),
        ("shape", pa.int16()),  # place in evaluate.rsa of an aggregation's shape; -1 for a search trace
        ("level", pa.int16()),  # 0 search, else the aggregation step
        ("set", pa.int32()),  # -1 for a search trace
        ("index", pa.int32()),
        ("members", pa.list_(pa.int32())),  # the quoted candidates: places in the population before, in prompt order
        ("answer", pa.string()),  # extracted; null: none
        ("verdict", pa.string()),
        ("reason", pa.string()),  # why it could not be graded
        ("at_limit", pa.list_(pa.string())),  # verdicts of the trace cut at each of evaluate.lengths
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),  # of prompt_tokens, from the cache
        ("computed_tokens", pa.int32()),  # of prompt_tokens, run through the model
        ("logp_sum", pa.float64()),
        ("tokens", pa.list_(pa.int32())),
        ("text", pa.string()),
    ]
)
ELSEWHERE = ("servers", "sglang")  # keys of `rollout` that say where, and not what, is sampled
NOT_SAMPLED = ("every", "pass_at", "majority_at", "bootstrap")  # keys of `evaluate` that change no trace


def chunks(n_problems: int, size: int) -> list[range]:
    """The problems of each chunk, `size` of them in order; the last chunk takes what is left."""
    return [range(start, min(start + size, n_problems)) for start in range(0, n_problems, size)]


def identity(config: Config, adapters: dict[str, str | None], problems: Sequence[Problem]) -> dict[str, Any]:
    """What the traces of an evaluation depend on; plain JSON."""
    whole = config.model_dump(mode="json")
    evaluate = {key: value for key, value in whole["evaluate"].items() if key not in NOT_SAMPLED}
    model = {key: value for key, value in whole["model"].items() if key != "adapter"}
    return {
        "seed": config.seed,
        "model": model,
        "adapter": {label: adapter_digest(folder, config.model.policy) for label, folder in adapters.items()},
        "problems": digest(problems),
        "rollout": {key: value for key, value in whole["rollout"].items() if key not in ELSEWHERE},
        "reward": {key: whole["reward"][key] for key in ("kind", "function", "correct_at")},
        "evaluate": evaluate,
    }


def adapter_digest(folder: str | None, policy: str = "shared") -> str | None:
    """sha256 of the weights of an adapter, or of both after each other; None for the bare model. policy:
    `model.policy`."""
    if folder is None:
        return None
    folders = adapter_folders(Path(folder).expanduser(), ADAPTERS[policy]).values()
    return hashlib.sha256(b"".join((own / WEIGHTS).read_bytes() for own in folders)).hexdigest()


class Store:
    """The folder. Raises ConfigError when it holds traces of another evaluation."""

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self.identity = folder, identity
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with self.alone():
            if not holds_traces(folder):
                write_json(folder / "identity.json", identity)
            self._check()

    def _check(self) -> None:
        for key, found, wanted in _differences(self._found(), self.identity):
            raise ConfigError(
                f"--out: {str(self.folder)!r} holds traces of another evaluation: there {key} is {found!r}, here "
                f"{wanted!r}; choose another --out"
            )

    def _found(self) -> dict[str, Any]:
        file = self.folder / "identity.json"
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            found = getattr(error, "strerror", None) or error
        if isinstance(found, dict):
            return found
        raise ConfigError(
            f"--out: {str(file)!r} cannot be read ({found}), and it says what the traces beside it are of; choose "
            "another --out"
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other process on this folder is inside such a block."""
        with writing(self.folder):
            lock = (self.folder / ".lock").open("a")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
            yield

    def file(self, name: str | int) -> Path:
        return self.folder / (f"chunk_{name:06d}.parquet" if isinstance(name, int) else f"{name}.parquet")

    def has(self, name: str | int) -> bool:
        return self.file(name).exists()

    def write(self, name: str | int, samples: Sequence[ProblemSamples]) -> None:
        rows = [row for one in samples for row in _rows(one)]
        with self.alone():
            self._check()
            with written_aside(self.file(name)) as aside:
                table = pa.Table.from_pylist(rows, schema=SCHEMA)
                pq.write_table(table, aside, compression="zstd", write_page_checksum=True)

    def read(self, name: str | int, problems: Sequence[Problem], traces: int) -> list[ProblemSamples]:
        return read_chunk(self.file(name), problems, traces)


def holds_traces(folder: Path) -> bool:
    return any(folder.glob("*.parquet"))


def read_chunk(file: Path, problems: Sequence[Problem], traces: int) -> list[ProblemSamples]:
    """The traces of `problems`, `traces` of each, as they were written. Raises ConfigError for anything else."""
    by_id = {problem.id: ProblemSamples(problem, [], []) for problem in problems}
    places: dict[str, list[tuple[int, ...]]] = {name: [] for name in by_id}
    try:
        rows = pq.read_table(file, schema=SCHEMA, page_checksum_verification=True).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise _damaged(file, first_line(error)) from None
    for row in rows:
        if row["problem"] not in by_id:
            raise _damaged(file, f"it has traces of {row['problem']!r}, a problem of another chunk")
        place = (row["shape"], row["level"], row["set"], row["index"])
        if None in place:
            raise _damaged(file, f"a trace of problem {row['problem']!r} has no place")
        places[row["problem"]].append(place)
        one, shape, level = by_id[row["problem"]], row["shape"], row["level"]
        if shape < 0:
            one.search.append(_sample(row))
            continue
        _grow(one.rsa, shape + 1)
        _grow(one.rsa[shape], level)
        one.rsa[shape][level - 1].append(_sample(row))
    for name, found in places.items():
        if len(found) != traces or found != sorted(set(found)):
            raise _damaged(
                file, f"of problem {name!r} it has {len(found)} traces, not {traces} different ones in order"
            )
    return list(by_id.values())


def _damaged(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file}: is damaged ({why}); delete it and go on with --resume, which samples it again")


def _grow(lists: list[list], size: int) -> None:
    lists.extend([] for _ in range(size - len(lists)))


def _sample(row: dict[str, Any]) -> Sample:
    fields = {name: row[name] for name in Sample.__dataclass_fields__ if name != "key"}
    return Sample(key=TraceKey(row["problem"], row["level"], row["set"], row["index"]), **fields)


def _rows(one: ProblemSamples) -> Iterator[dict[str, Any]]:
    for sample in one.search:
        first = sample.key.level == SEARCH and sample.key.index == 0
        question = {"question": one.problem.question, "reference": one.problem.answer} if first else {}
        yield _row(sample, -1) | question
    for shape, steps in enumerate(one.rsa):
        yield from (_row(sample, shape) for traces in steps for sample in traces)


def _row(sample: Sample, shape: int) -> dict[str, Any]:
    key = sample.key
    place = {"problem": key.problem, "shape": shape, "level": key.level, "set": key.set, "index": key.index}
    return {name: getattr(sample, name) for name in Sample.__dataclass_fields__ if name != "key"} | place


def _differences(found: Any, wanted: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value there, value here) of what differs."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in dict.fromkeys([*found, *wanted]):
            yield from _differences(found.get(name), wanted.get(name), f"{key}.{name}" if key else name)
    elif found != wanted:
        yield key, found, wanted
