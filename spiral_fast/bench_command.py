"""Finds and runs the benchmark suites, which are part of a checkout and not of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from spiral_fast.config import ConfigError


def suites(root: Path) -> list[str]:
    """Names of the folders bench/<suite>/ of a checkout that can be run."""
    return sorted(file.parent.name for file in root.glob("bench/*/run.py"))


def run_suites(name: str, root: Path | None = None) -> None:
    """Run `bench.<name>.run.run()`, or every suite's. Raises ConfigError outside a checkout or for an unknown name."""
    root = root or Path(__file__).resolve().parents[1]
    known = suites(root)
    if not known:
        raise ConfigError(f"bench: no benchmarks beside {root / 'spiral_fast'}: they are part of a checkout only")
    if name and name not in known:
        raise ConfigError(f"bench: no suite {name!r}; there are: {', '.join(known)}")
    sys.path.insert(0, str(root))
    for suite in [name] if name else known:
        importlib.import_module(f"bench.{suite}.run").run()
