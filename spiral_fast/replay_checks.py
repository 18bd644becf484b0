"""What a replay refuses: gaps, traces of another model, traces of another shape."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from spiral_fast.config import Config, ConfigError
from spiral_fast.learner.model import LoadedModel
from spiral_fast.record.trace_store import read_file
from spiral_fast.trace import ProblemRollout


def trace_files(traces: Path) -> dict[int, Path]:
    """step -> file, in order and without a gap."""
    folder = traces / "traces" if (traces / "traces").is_dir() else traces
    files = [folder] if folder.is_file() else sorted(folder.glob("step_*.parquet"))
    if not files:
        raise ConfigError(f"--replay: {str(traces)!r} holds no traces (step_*.parquet); was record.traces on?")
    try:
        steps = {int(file.stem.removeprefix("step_")): file for file in files}
    except ValueError:
        raise ConfigError(f"--replay: {str(traces)!r} is not a file of traces, step_000001.parquet say") from None
    missing = set(range(min(steps), max(steps))) - steps.keys()
    if missing:
        raise ConfigError(f"--replay: {str(folder)!r} lacks step {min(missing)}; the steps after it build on it")
    return steps


def check_tokens(file: Path, loaded: LoadedModel) -> None:
    """Refuse tokens of another vocabulary and traces that the model has no room for."""
    table = read_file(file, ["problem", "prompt", "tokens", "prompt_length", "length"])
    vocabulary = loaded.causal_lm.get_input_embeddings().num_embeddings
    for column in ("prompt", "tokens"):
        largest = pc.max(pc.list_flatten(table[column])).as_py() or 0
        if largest >= vocabulary:
            raise ConfigError(
                f"{file}: token {largest}; the model has {vocabulary}: another model sampled these traces"
            )
    lengths = pc.add(table["prompt_length"], table["length"])
    longest = pc.max(lengths).as_py() or 0
    if longest > loaded.max_context:
        problem = table["problem"][pc.index(lengths, longest).as_py()].as_py()
        raise ConfigError(
            f"{file}: problem {problem!r} has {longest} tokens, prompt and trace together; the model's context is "
            f"{loaded.max_context}"
        )


def check_shape(rollout: ProblemRollout, config: Config, file: Path) -> None:
    settings = config.rollout
    found = [len(rollout.search), *rollout.sets.shape, *{len(group) for group in rollout.aggregation}]
    expected = [settings.n_search, settings.n_sets, settings.set_size]
    expected += [settings.n_aggregations] if settings.n_sets else []
    if found != expected:
        raise ConfigError(
            f"{file}: problem {rollout.problem.id!r} has {found} (search traces, sets, members, aggregations per set); "
            f"rollout in the config asks for {expected}"
        )
