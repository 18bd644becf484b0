"""The command `spiral-fast`. Starts without torch; says in one line what is missing when the extra `train` is."""

from __future__ import annotations

import importlib.util
import sys

from spiral_fast.install import install_command

NEEDS = {"typer": "typer", "rich": "rich", "pydantic": "pydantic", "yaml": "pyyaml"}  # module: package


def main() -> None:
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"spiral-fast: {', '.join(missing)} not installed; run: {install_command('train')}")
    try:
        from spiral_fast.commands import app

        app()
    except KeyboardInterrupt:  # before a command began
        sys.exit(130)


if __name__ == "__main__":
    main()
