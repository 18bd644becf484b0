"""What was read, taken out and kept, as lines to print."""

from __future__ import annotations


def count_lines(counts: dict[str, int]) -> list[str]:
    """One line each, the numbers right-aligned."""
    width = max(len(f"{count:,}") for count in counts.values())
    return [f"{count:>{width},}  {name}" for name, count in counts.items()]
