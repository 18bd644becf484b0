"""A run in trackio's local store (`trackio show`), or where its environment variables send it. A resumed run goes on
with it; a step made twice is there twice."""

from __future__ import annotations

from pathlib import Path

import trackio

from spiral_fast.config import Config
from spiral_fast.record.writers.writers import kept_name


class Trackio:
    def __init__(self, run_dir: Path, config: Config):
        self.run = trackio.init(
            project=config.record.project,
            name=kept_name(run_dir, "trackio"),
            resume="allow",
            config=config.model_dump(mode="json"),
            embed=False,
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.run.finish()
