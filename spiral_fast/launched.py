"""What torchrun told this process, read without torch: before the processes have met (spiral_fast/ranks.py)."""

from __future__ import annotations

import os


def launched() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def launched_rank() -> int:
    """Which of them this process is; 0 without torchrun."""
    return int(os.environ["RANK"]) if launched() > 1 else 0
