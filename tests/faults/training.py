"""A training in a process of its own, as a user starts it: its output, each line with its time, and where it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from spiral_fast.config import Config, load_config
from tests.sglang.processes import family

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S, START_TIMEOUT_S = 15.0, 300.0
# A server is asked whether it lives after TIMEOUT_S and lost after as long again; the rest is for a busy machine.
DETECTED_WITHIN_S = 2 * TIMEOUT_S + 30.0
RECOVERED_WITHIN_S = DETECTED_WITHIN_S + START_TIMEOUT_S
OVERRIDES = [
    "rollout.engine=sglang",
    f"rollout.sglang={{timeout_s: {TIMEOUT_S}, start_timeout_s: {START_TIMEOUT_S}}}",
    "batch.live_problems=6",
    "learner.steps=100000",  # until it is ended
    "record={save_every: 1, checkpoint_every: 1}",
    "evaluate={samples: 1, pass_at: [1], majority_at: [], rsa: {steps: 0}, bootstrap: 20}",
    "problems={source: parts, eval_size: 1, train_size: 256}",
    "threads=1",
]
AT_WORK = re.compile(rb"batch, .*#running-req: (\d+)")  # in a server's log
BUSY = 10  # requests a server runs together in the middle of a rollout; a canary is one


class Line(NamedTuple):
    time: float  # of time.monotonic()
    text: str


class Training:
    """`overrides`: on top of configs/demo.yaml with small sizes."""

    def __init__(self, run: Path, *overrides: str, environment: dict[str, str] | None = None):
        self.run = run
        self.overrides = [*OVERRIDES, *overrides, f"run_dir={run}"]
        self.config: Config = load_config(ROOT / "configs" / "demo.yaml", self.overrides)
        self.lines: list[Line] = []
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "1000"} | (environment or {})
        self._process: subprocess.Popen | None = None
        self._processes: list[psutil.Process] = []

    def start(self, *, resume: bool = False, changes: tuple[str, ...] = ()) -> None:
        what = ["--resume", str(self.run), *changes] if resume else ["configs/demo.yaml", *self.overrides]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spiral_fast.cli", "train", *what],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, args=(self._process, self.lines), daemon=True)
        self._reader.start()

    def go_on(self, *changes: str) -> None:
        """Start it, or go on with it, unless it runs."""
        if not self.running():
            self.start(resume=(self.run / "config.yaml").exists(), changes=changes)

    @staticmethod
    def _read(process: subprocess.Popen, lines: list[Line]) -> None:
        for line in process.stdout:
            lines.append(Line(time.monotonic(), line.rstrip("\n")))

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """The trainer's and its server's, also those that have ended since they were last asked for."""
        if self.running():
            self._processes = list({*self._processes, *family(self._process.pid)})
        return self._processes

    def server(self) -> psutil.Process:
        """The newest that it started."""
        (server,) = (p for p in psutil.Process(self._process.pid).children() if "sglang" in " ".join(p.cmdline()))
        return server

    def scheduler(self) -> psutil.Process:
        (one,) = (p for p in self.server().children(recursive=True) if "scheduler" in " ".join(p.cmdline()))
        return one

    def steps(self) -> int:
        """Recorded ones."""
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for(self, pattern: str, since: float, within_s: float) -> Line:
        """The first line of its output since then that the pattern is found in."""
        end = time.monotonic() + within_s
        while True:
            for line in list(self.lines):
                if line.time >= since and re.search(pattern, line.text):
                    return line
            ended = not self.running() and not self._reader.is_alive()
            if ended or time.monotonic() > end:
                why = "it has ended" if ended else f"not within {within_s:g} s"
                raise AssertionError(f"{pattern!r}: {why}; the last lines:\n{self.tail()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int, within_s: float = 300.0) -> None:
        end = time.monotonic() + within_s
        while self.steps() < step:
            assert self.running(), self.tail()
            assert time.monotonic() < end, f"step {step} not within {within_s:g} s\n{self.tail()}"
            time.sleep(0.05)

    def mid_batch(self, log: Path | None = None, within_s: float = 600.0) -> int:
        """Wait until a server has many requests of a step after the first; the step's number. log: the server's."""
        log = log or self.run / "sglang_server.log"
        end = time.monotonic() + within_s
        self.wait_for_step(1, within_s)
        step = self.steps()
        while self.steps() == step:  # not in the midst of one that may end at once
            assert self.running() and time.monotonic() < end, self.tail()
            time.sleep(0.02)
        at = log.stat().st_size
        while True:
            with open(log, "rb") as file:
                file.seek(at)
                if any(int(n) >= BUSY for n in AT_WORK.findall(file.read())):
                    self.processes()
                    return self.steps() + 1
            assert self.running() and time.monotonic() < end, self.tail()
            time.sleep(0.02)

    def end(self, within_s: float = 120.0) -> int:
        """Wait for its end; the exit code."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {within_s:g} s\n{self.tail()}") from None
        self._reader.join()
        return code

    def tail(self, n: int = 15) -> str:
        return "\n".join(line.text for line in self.lines[-n:])

    def errors(self) -> list[str]:
        """Lines from the first `error:` on."""
        texts = [line.text for line in self.lines]
        return texts[next(i for i, text in enumerate(texts) if text.startswith("error:")) :]

    def kill(self) -> None:
        """Whatever it left."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        if self._process:
            self._process.wait()
