"""Finds and runs the benchmark suites, which are part of a checkout and not of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from spiral_fast.config import ConfigError


def suites(root: Path) -> list[str]:
    """Names of the folders bench/<suite>/ of a checkout that can be run."""
    return sorted(file.parent.name for file in root.glob("bench/*/run.py"))


def run_suites(name: str, root: Path | None = None, *, engine: str = "") -> None:
    """Run `bench.<name>.run.run()`, or every suite's; with an engine `bench.<name>.<engine>.run()`. Raises ConfigError
    outside a checkout or for an unknown name."""
    root = root or Path(__file__).resolve().parents[1]
    known = suites(root)
    if not known:
        raise ConfigError(f"bench: no benchmarks beside {root / 'spiral_fast'}: they are part of a checkout only")
    if name and name not in known:
        raise ConfigError(f"bench: no suite {name!r}; there are: {', '.join(known)}")
    if engine and (name, engine) != ("rollout", "sglang"):
        raise ConfigError(f"--engine: {engine!r} of {name or 'all suites'!r} has no bench; there is: rollout, sglang")
    sys.path.insert(0, str(root))
    if engine:
        importlib.import_module(f"bench.{name}.{engine}").run()
        return
    for suite in [name] if name else known:
        importlib.import_module(f"bench.{suite}.run").run()
