"""Two servers of the demo's model that trainings use by URL."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from spiral_fast.config import load_config
from spiral_fast.rollout.sglang.base_model import base_model
from spiral_fast.rollout.sglang.names import KEY_VARIABLE
from spiral_fast.rollout.sglang.server import ServerProcess
from tests.faults.training import OVERRIDES, ROOT
from tests.sglang.processes import family

KEY = "a-key-for-tests"


class Servers:
    def __init__(self, folder: Path):
        self._folder = folder
        self._config = load_config(ROOT / "configs" / "demo.yaml", OVERRIDES)
        self._base = base_model(self._config.model)
        self.processes = [self._make(n) for n in range(2)]
        with ThreadPoolExecutor(2) as together:
            list(together.map(ServerProcess.start, self.processes))

    def _make(self, n: int, port: int | None = None) -> ServerProcess:
        log = self._folder / f"server{n}.log"
        return ServerProcess(self._config, self._base, log, port=port, api_key=KEY)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.processes]

    @property
    def environment(self) -> dict[str, str]:
        return {KEY_VARIABLE: KEY}

    @property
    def override(self) -> str:
        return f"rollout.servers=[{', '.join(self.urls)}]"

    def family(self, n: int) -> list[psutil.Process]:
        return family(self.processes[n].pid)

    def freeze(self, n: int) -> None:
        for process in self.family(n):
            process.send_signal(signal.SIGSTOP)

    def thaw(self, n: int) -> None:
        for process in self.family(n):
            process.send_signal(signal.SIGCONT)

    def start_again(self, n: int) -> None:
        """At the same URL."""
        self.processes[n].stop(at_once=True)
        self.processes[n] = self._make(n, self.processes[n].port)
        self.processes[n].start()

    def stop(self) -> None:
        for server in self.processes:
            server.stop(at_once=True)
