"""What was read, taken out and kept, in words to print."""

from __future__ import annotations


def count_lines(counts: dict[str, int]) -> list[str]:
    """One line each, the numbers right-aligned."""
    width = max(len(f"{count:,}") for count in counts.values())
    return [f"{count:>{width},}  {name}" for name, count in counts.items()]


def counts_in_a_line(counts: dict[str, int]) -> str:
    """`problems: 53,291 rows read; 11,843 taken out: not level >= 2; 41,418 train; 30 eval`."""
    return "problems: " + "; ".join(f"{count:,} {name}" for name, count in counts.items())
