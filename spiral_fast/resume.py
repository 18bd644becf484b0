"""`train --resume RUN`: the config a run goes on with."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.record.files import by_step, holds_run
from spiral_fast.record.run_folder import read_metrics

# What may change: the next steps compute the same; all but the first line up to rounding. Whole sections end in a dot.
MAY_CHANGE = (
    *("run_dir", "learner.steps", "evaluate.every", "record.", "reward.workers", "learner.max_skipped_steps"),
    *("learner.sharing", "learner.self_check", "learner.micro_batch_tokens", "learner.checkpointing"),
    *("learner.fsdp", "learner.offload_base", "learner.offload_checkpoints"),
    *("rollout.servers", *(f"rollout.sglang.{key}" for key in ("timeout_s", "start_timeout_s", "memory_fraction"))),
)


def resumed_config(run: Path, overrides: list[str]) -> Config:
    """The config.yaml of `run` with `overrides`; a folder that was moved is followed. Raises ConfigError for a folder
    without a run, a run that is longer than asked for, and a change, by override or by hand in config.yaml, that would
    make it another run."""
    file = run / "config.yaml"
    if not holds_run(run) or not file.exists():
        raise ConfigError(f"--resume: {str(run)!r} holds no run (no config.yaml)")
    if (run / "replay.json").exists():
        raise ConfigError(f"--resume: {str(run)!r} was made with --replay and samples nothing; replay again instead")
    here = f"run_dir={str(run)!r}"
    config = load_config(file, [*overrides, here])
    begun = _begun_with(run) or fixed_values(load_config(file, [here]))
    for key, value in fixed_values(config).items():
        if key in begun and begun[key] != value:  # a key that a newer version added is not in it
            raise ConfigError(
                f"{key}: {value!r} cannot be used with --resume: the run was begun with {begun[key]!r}; only "
                f"{', '.join(key.rstrip('.') for key in MAY_CHANGE[1:])} may change"
            )
    made = len(read_metrics(run / "metrics.jsonl"))
    if config.learner.steps < made:
        raise ConfigError(f"learner.steps: {config.learner.steps} is too few for --resume: the run has made {made}")
    return config


def fixed_values(config: Config) -> dict[str, Any]:
    """Dotted key -> value, as JSON, of all that a run goes on with unchanged."""
    values = _values(config, config.model_dump(mode="json"))
    return {key: value for key, value in values.items() if not key.startswith(MAY_CHANGE)}


def _values(section: BaseModel, dumped: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in section:
        if isinstance(value, BaseModel):
            found |= _values(value, dumped[name], f"{prefix}{name}.")
        else:
            found[prefix + name] = dumped[name]
    return found


def _begun_with(run: Path) -> dict[str, Any] | None:
    """`fixed_values` of the run's begin, by its newest readable checkpoint; None without any."""
    for folder in reversed(by_step(run / "checkpoints").values()):
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: restoring passes it over and says so
            return dict(json.loads((folder / "run.json").read_text())["config"])
    return None
