"""What a run says while it goes: one line per step, a bar within a long phase. Without a terminal, plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spiral_fast.record.headline import headline

PLAIN_S = 30.0  # without a terminal, seconds between two lines on one phase


class Console:
    """A context manager. `progress(phase)` gives a callback (done, total); its bar goes once done reaches total."""

    def __init__(self, rich: RichConsole | None = None):
        self.rich = rich or RichConsole(highlight=False)
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        self.bars = Progress(*columns, console=self.rich, transient=True, refresh_per_second=2)
        self.live = self.rich.is_terminal
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Console:
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            self.bars.stop()

    def line(self, text: str) -> None:
        self.rich.print(text, markup=False, soft_wrap=True)

    def progress(self, phase: str) -> Callable[[int, int], None]:
        return self._bar(phase) if self.live else self._plain(phase)

    def _bar(self, phase: str) -> Callable[[int, int], None]:
        if phase in self._tasks:  # left behind by an interrupted phase
            self.bars.remove_task(self._tasks.pop(phase))
        self._tasks[phase] = self.bars.add_task(phase, total=None)

        def report(done: int, total: int) -> None:
            if phase not in self._tasks:
                self._tasks[phase] = self.bars.add_task(phase, total=total)
            self.bars.update(self._tasks[phase], completed=done, total=total)
            if done >= total:
                self.bars.remove_task(self._tasks.pop(phase))

        return report

    def _plain(self, phase: str) -> Callable[[int, int], None]:
        last = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if done < total and time.monotonic() - last >= PLAIN_S:
                last = time.monotonic()
                self.line(f"  {phase}: {done} of {total}")

        return report


def step_line(step: int, steps: int, metrics: dict[str, Any]) -> str:
    """The step's most telling numbers; what was not measured is left out."""
    width = len(str(steps))
    parts = [f"step {step:{width}d}/{steps}"]
    names = ["search", *(key.partition("/")[2] for key in metrics if key.startswith("reward/aggregation"))]
    rewards = [(name, metrics.get(f"reward/{name}")) for name in names]
    parts += [f"{name} {reward:.3f}" for name, reward in rewards if reward is not None]
    if "problems/live" in metrics:
        parts.append(f"live {metrics['problems/live']} dead {metrics['problems/dead']}")
    seconds = metrics.get("time/rollout", 0.0)
    if seconds and "tokens/generated" in metrics:
        parts.append(f"{metrics['tokens/generated'] / seconds:,.0f} tok/s")
    if metrics.get("time/learner_tokens_per_s_computed") is not None:
        parts.append(f"learner {metrics['time/learner_tokens_per_s_computed']:,.0f} tok/s")
    for name, key in (("lr", "learning_rate"), ("grad", "grad/norm"), ("gap", "logp_gap/mean")):
        if metrics.get(key) is not None:
            parts.append(f"{name} {metrics[key]:.2g}")
    if metrics.get("time/learner_mfu") is not None:
        parts.append(f"MFU {metrics['time/learner_mfu']:.0%}")
    if "time/step" in metrics:
        parts.append(f"{metrics['time/step']:.1f} s")
    if metrics.get("skipped"):
        parts.append(f"update skipped: {metrics['skipped']}")
    return "  ".join(parts)


def evaluation_line(label: str, result: dict[str, Any]) -> str:
    """pass@k, majority@k and recursive self-aggregation of one evaluation."""
    return "  ".join([f"evaluation {label}:", *(f"{name} {value:.3f}" for name, value in headline(result).items())])
