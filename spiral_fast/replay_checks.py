"""What a replay refuses: gaps, traces of another model, traces of another shape."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from spiral_fast.config import Config, ConfigError
from spiral_fast.learner.model import LoadedModel
from spiral_fast.levels import levels_of
from spiral_fast.record.files import by_step
from spiral_fast.record.trace_store import read_file
from spiral_fast.trace import ProblemRollout


def trace_files(traces: Path) -> dict[int, Path]:
    """step -> file, in order and without a gap."""
    folder = traces / "traces" if (traces / "traces").is_dir() else traces
    steps = by_step(folder, ".parquet")
    if folder.is_file():
        steps = {step: file for step, file in by_step(folder.parent, ".parquet").items() if file == folder}
        if not steps:
            raise ConfigError(f"--replay: {str(traces)!r} is not a file of traces, step_000001.parquet say")
    if not steps:
        raise ConfigError(f"--replay: {str(traces)!r} holds no traces (step_*.parquet); was record.traces on?")
    missing = set(range(min(steps), max(steps))) - steps.keys()
    if missing:
        raise ConfigError(f"--replay: {str(folder)!r} lacks step {min(missing)}; the steps after it build on it")
    return steps


def check_tokens(file: Path, loaded: LoadedModel) -> None:
    """Refuse a file of something else, tokens of another vocabulary and traces that the model has no room for."""
    table = read_file(file, ["problem", "prompt", "tokens", "logp", "reward", "prompt_length", "length"])
    for column in ("problem", "tokens", "logp", "reward", "length"):
        if table[column].null_count:
            raise ConfigError(f"{file}: row {_first(pc.is_null(table[column]))} has no {column}: not traces of a step")
    lengths = pc.list_value_length(table["tokens"])
    for column in (table["length"], pc.list_value_length(table["logp"])):
        if (wrong := _first(pc.not_equal(column, lengths))) >= 0:
            raise ConfigError(f"{file}: row {wrong} is damaged: length, tokens and log-probs are not equally many")
    vocabulary = loaded.causal_lm.get_input_embeddings().num_embeddings
    for column in ("prompt", "tokens"):
        extremes = pc.min_max(pc.list_flatten(table[column])).as_py().values()
        for token in (token or 0 for token in extremes):  # None: there is no token
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"{file}: token {token}; the model has {vocabulary}: another model sampled these traces"
                )
    lengths = pc.add(table["prompt_length"], table["length"])
    longest = pc.max(lengths).as_py() or 0
    if longest > loaded.max_context:
        problem = table["problem"][pc.index(lengths, longest).as_py()].as_py()
        raise ConfigError(
            f"{file}: problem {problem!r} has {longest} tokens, prompt and trace together; the model's context is "
            f"{loaded.max_context}"
        )


def _first(flags: pa.ChunkedArray) -> int:
    """Index of the first true one; -1 without."""
    return pc.index(flags, True).as_py()


def check_shape(rollout: ProblemRollout, config: Config, file: Path) -> None:
    levels = levels_of(config)
    found, expected = [len(rollout.search)], [config.rollout.n_search]
    for stage in rollout.levels:
        found += [len(stage.sets), *_distinct(map(len, stage.members())), *_distinct(map(len, stage.groups))]
    for level in levels:
        expected += [level.all_sets, *level.set_sizes, level.n_aggregations]
    expected += [] if levels else [0]  # sets
    if found != expected:
        raise ConfigError(
            f"{file}: problem {rollout.problem.id!r} has {found} (search traces; of each level sets, members, "
            f"aggregations per set); rollout in the config asks for {expected}"
        )


def _distinct(sizes: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(sizes))
