"""A run on wandb, or in RUN/wandb with WANDB_MODE=offline. A resumed run goes on with it; a step made twice may show
its first values."""

from __future__ import annotations

from pathlib import Path

import wandb

from spiral_fast.config import Config
from spiral_fast.record.writers.writers import kept_name


class Wandb:
    def __init__(self, run_dir: Path, config: Config):
        self.run = wandb.init(
            project=config.record.project,
            id=kept_name(run_dir, "wandb"),
            name=run_dir.resolve().name,
            resume="allow",
            dir=run_dir,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # the run's own console draws bars
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.run.finish()
