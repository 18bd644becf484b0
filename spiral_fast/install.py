"""The command that installs what is missing. spiral-fast is on no index: it is installed from its repository."""

from __future__ import annotations


def install_command(extra: str) -> str:
    return f"pip install -e '.[{extra}]' (in the repository's folder)"
