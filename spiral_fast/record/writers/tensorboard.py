"""RUN/tensorboard: event files that `tensorboard --logdir RUN` draws.

Written in this thread: tensorboardX's SummaryWriter has one of its own, whose death (a full disk) would block the run.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from spiral_fast.config import Config


class TensorBoard:
    def __init__(self, run_dir: Path, config: Config):
        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.iterdir())  # file names hold whole seconds: two starts may share one
        self.events = EventsWriter(str(folder / "events"), f".{number:04d}")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """TensorBoard drops what other files hold from the step of such an event on."""
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self.events.close()

    def _write(self, event: Event) -> None:
        self.events.write_event(event)
        self.events.flush()
