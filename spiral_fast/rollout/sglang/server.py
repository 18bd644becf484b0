"""An SGLang server of one's own: the flags that make it fit a config, its start and its end."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from spiral_fast.config import Config, ConfigError
from spiral_fast.interrupts import result_of
from spiral_fast.learner.roles import ADAPTERS
from spiral_fast.rollout.engine import EngineFailed
from spiral_fast.rollout.sglang.adapter import fused_names
from spiral_fast.rollout.sglang.base_model import BaseModel
from spiral_fast.rollout.sglang.client import Client
from spiral_fast.rollout.sglang.names import KEY_VARIABLE, PARENT_VARIABLE

LOOPBACK = "127.0.0.1"
# SGLang takes a prompt of up to 6 tokens less than its limits, and cuts a completion 2 tokens before them.
SPARE_TOKENS = 8
# Seconds after SIGTERM before SIGKILL. SGLang looks for it every 5 s and gives its scheduler 15 s to release the GPU's
# memory; without a GPU there is nothing to wait for.
STOP_S = {"cuda": 30.0, "cpu": 1.0}
LOG_LINES = 12  # of a server that did not start, shown
LOG_BYTES = 1 << 16  # of its log, read for them


class ServerFailed(EngineFailed):
    """A server did not start; the message ends with the last lines of its log."""


def server_flags(config: Config, base: BaseModel, host: str, port: int) -> list[str]:
    """The command line of SGLang for `config`, its key left out. Raises ConfigError."""
    rollout, lora = config.rollout, config.model.lora
    flags: dict[str, str | int | float | bool] = {
        "model-path": str(base.folder),
        "host": host,
        "port": port,
        "skip-tokenizer-init": True,
        "dtype": config.model.dtype,
        "tensor-parallel-size": rollout.sglang.tensor_parallel,
        "context-length": base.max_context + SPARE_TOKENS,
        "max-running-requests": rollout.max_running,
        "chunked-prefill-size": rollout.prefill_chunk,
        "schedule-policy": "lpm",  # of the waiting requests those first whose prefix is in the cache
        "enable-lora": True,
        "max-lora-rank": lora.rank,
        # the present policy's, those of the next version at their canary, none (SGLang's health check)
        "max-loras-per-batch": 2 * len(ADAPTERS[config.model.policy]) + 1,
        "random-seed": config.seed % 2**31,
        "skip-server-warmup": True,  # ServerProcess.start waits for a token anyway
    }
    if torch.cuda.is_available() and config.device != "cpu":
        flags["enable-memory-saver"] = True  # so that the KV cache's memory can be given back while the learner works
        if rollout.sglang.memory_fraction is not None:
            flags["mem-fraction-static"] = rollout.sglang.memory_fraction
        if rollout.sglang.deterministic:
            flags["enable-deterministic-inference"] = True
    else:
        for key in ("memory_fraction", "deterministic"):
            if value := getattr(rollout.sglang, key):
                raise ConfigError(f"rollout.sglang.{key}: {value!r} cannot be used: there is no GPU; remove it")
        flags |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "lora-backend": "torch_native",
            "max-total-tokens": rollout.cache_tokens + SPARE_TOKENS,
        }
    flags |= {name.removeprefix("--").replace("_", "-"): value for name, value in rollout.sglang.args.items()}
    line = [part for name, value in flags.items() for part in _flag(name, value)]
    return [*line, "--lora-target-modules", *fused_names(base.lora_modules)]


def _flag(name: str, value: str | int | float | bool) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


class ServerProcess:
    """Started by `start`, ended by `stop`; it does not outlive this process, not even by kill -9.

    port: None = a free one. api_key: None = a random one, known to this process and its server only; "" = none.
    """

    def __init__(
        self,
        config: Config,
        base: BaseModel,
        log: Path,
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        api_key: str | None = None,
    ):
        self.log = log
        self.host = host
        self.port = port or _free_port()
        self.api_key = secrets.token_urlsafe(32) if api_key is None else api_key or None
        self._flags = server_flags(config, base, host, self.port)
        self._timeouts = config.rollout.sglang
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        """As this machine reaches it."""
        return self.url_on(LOOPBACK)

    def url_on(self, machine: str) -> str:
        """As others reach it, if it listens to all: this machine is `machine` to them."""
        host = machine if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Returns once it generates. Raises ServerFailed when it ends before or takes longer than start_timeout_s; no
        process is left then, nor after Ctrl-C."""
        _refuse_taken(self.host, self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._timeouts.start_timeout_s
        try:
            with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
                self._begin = log.tell()
                self._process = result_of(_STARTER.submit(self._popen, log))
            while not asyncio.run(self._generates()):
                if not self.running():
                    raise ServerFailed(
                        f"the SGLang server ended with exit code {self._process.returncode}{self.log_end()}"
                    )
                if time.monotonic() > deadline:
                    limit = f"rollout.sglang.start_timeout_s: {self._timeouts.start_timeout_s:g}"
                    raise ServerFailed(f"the SGLang server does not generate yet ({limit}){self.log_end()}")
                time.sleep(0.3)
        except BaseException:
            self.stop(at_once=True)
            raise

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, *, at_once: bool = False) -> None:
        """SIGTERM, then SIGKILL of its process group: all its processes are gone on return."""
        if self._process is None:
            return
        try:
            if self.running() and not at_once:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(STOP_S["cuda" if torch.cuda.is_available() else "cpu"])
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(self._process.pid)
            self._process.wait()

    def _popen(self, log) -> subprocess.Popen:
        health_s = max(1, int(self._timeouts.timeout_s))
        environment = os.environ | {
            PARENT_VARIABLE: str(os.getpid()),
            KEY_VARIABLE: self.api_key or "",
            "SGLANG_HEALTH_CHECK_TIMEOUT": str(health_s),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE_TOKENS
            "HF_HUB_OFFLINE": "1",  # all it needs is in the folder
        }
        if not torch.cuda.is_available():
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return subprocess.Popen(
            [sys.executable, "-m", "spiral_fast.rollout.sglang.launch", *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal is for this process, which then stops the server
            env=environment,
        )

    async def _generates(self) -> bool:
        client = Client(self.url, self.api_key, timeout_s=self._timeouts.timeout_s)
        try:
            return await client.alive(2.0)
        finally:
            await client.aclose()

    def log_end(self) -> str:
        """Its last lines since the start, for a message."""
        with open(self.log, "rb") as log:
            log.seek(max(self._begin, log.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = log.read(LOG_BYTES).decode(errors="replace").splitlines()
        return "".join(f"\n  {line}" for line in [f"; {self.log} ends:", *lines[-LOG_LINES:]])


# Linux kills a server when the *thread* ends that started it: one that lasts as long as this process.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="sglang-starter")


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _refuse_taken(host: str, port: int) -> None:
    """Another server there would answer in its place."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerFailed(f"port {port} of {host} cannot be used ({error.strerror}); choose another") from None
