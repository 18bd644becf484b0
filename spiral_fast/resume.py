"""`train --resume RUN`: the config a run goes on with."""

from __future__ import annotations

from pathlib import Path

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.record.files import holds_run

# What may change without changing what the next steps compute; whole sections end in a dot.
MAY_CHANGE = ("run_dir", "learner.steps", "evaluate.every", "record.", "reward.workers", "learner.max_skipped_steps")


def resumed_config(run: Path, overrides: list[str]) -> Config:
    """The config.yaml of `run` with `overrides`; a folder that was moved is followed. Raises ConfigError for a folder
    without a run and for an override that would make it another run."""
    file = run / "config.yaml"
    if not holds_run(run) or not file.exists():
        raise ConfigError(f"--resume: {str(run)!r} holds no run (no config.yaml)")
    if (run / "replay.json").exists():
        raise ConfigError(f"--resume: {str(run)!r} was made with --replay and samples nothing; replay again instead")
    here = f"run_dir={str(run)!r}"
    config, before = load_config(file, [*overrides, here]), load_config(file, [here])
    for key, (value, old) in _differences(config.model_dump(), before.model_dump()).items():
        if not any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in MAY_CHANGE):
            raise ConfigError(
                f"{key}: {value!r} cannot be used with --resume: the run was begun with {old!r}; only "
                f"{', '.join(key.rstrip('.') for key in MAY_CHANGE[1:])} may change"
            )
    return config


def _differences(new: dict, old: dict, prefix: str = "") -> dict[str, tuple]:
    """Dotted key -> (new value, old value)."""
    found = {}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old[key], dict):
            found |= _differences(value, old[key], f"{prefix}{key}.")
        elif value != old[key]:
            found[prefix + key] = value, old[key]
    return found
