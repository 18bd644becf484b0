"""One grading process and its deadline: it is killed from outside, with all its children, when its time is over."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

from spiral_fast.config import ConfigError, RewardConfig
from spiral_fast.rewards.grader import GraderFailed

START_S = 120.0  # seconds a process may take to import what it needs, on a busy machine
STARTS = 3  # starts in a row that may fail
LONGEST_REPLY = 2**20  # bytes


class _Died(Exception):
    """The process ended, or said what no grading process says."""


class GradingProcess:
    """A warm process for one thread at a time; `end` may come from any thread."""

    def __init__(self, config: RewardConfig, task: dict[str, str], trial: list[str]):
        """`task`: see child/__main__.py. `trial`: arguments of Python that show the user why no process starts."""
        self.config, self.trial = config, trial
        self.task = task | {"memory_mb": config.memory_mb, "timeout_s": config.timeout_s}
        self.process: subprocess.Popen | None = None
        self.restarts = 0
        self._ended = False
        self._lock = threading.Lock()  # held while the process is killed and waited for: its id stays its own

    def start(self) -> None:
        """Raises ConfigError when the reward function cannot be loaded, GraderFailed when no process starts."""
        for _ in range(STARTS):
            try:
                self._spawn()
                first = self._exchange(self.task, START_S)
            except (_Died, TimeoutError, OSError):  # OSError: no more processes or memory at the moment
                self.stop()
                if self._ended:
                    raise RuntimeError("the grader was closed") from None
                continue
            if first == "ready":
                return
            self.stop()
            if self.task["kind"] == "function":
                raise ConfigError(f"reward.function: {first['error']}")
            raise GraderFailed(f"a grading process did not start: {first['error']}")
        command = shlex.join([sys.executable, *self.trial])
        raise GraderFailed(f"a grading process did not start: run `{command}` to see why")

    def _spawn(self) -> None:
        self._number, self._rest = 0, b""
        self._socket, theirs = socket.socketpair()
        paths = [path or os.getcwd() for path in sys.path]
        with theirs, self._lock:
            # -P: the folder of the trainer's script is on `paths` already. A session of its own: Ctrl-C is for the
            # trainer, and the whole group can be killed.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spiral_fast.rewards.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        if self._ended:  # while this one was being started
            self._kill()

    def ask(self, request: list) -> dict:
        """The reply to one request, see child/__main__.py. A process that fails is replaced before this returns.

        Raises RuntimeError after `end`, and what `start` raises.
        """
        for _ in range(2):  # a process that is gone may not be this request's fault; a second one is
            self._number += 1
            try:
                reply = self._exchange([self._number, request], self.config.timeout_s)
                if not _is_reply(reply, self._number):
                    raise _Died
                return reply
            except TimeoutError:
                self._restart()
                return {"reason": f"no verdict within {self.config.timeout_s} s"}
            except _Died:
                self._restart()
        return {"reason": "the grading process died"}

    def _exchange(self, message: object, seconds: float) -> object:
        """Send one line, receive one. Raises TimeoutError and _Died."""
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            while b"\n" not in self._rest:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._socket.recv(65536)
                self._rest += received
                if not received or len(self._rest) > LONGEST_REPLY:
                    raise _Died
            line, self._rest = self._rest.split(b"\n", 1)
            return json.loads(line)
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError):  # no connection; no JSON
            raise _Died from None

    def _restart(self) -> None:
        self.stop()
        if self._ended:
            raise RuntimeError("the grader was closed")
        self.restarts += 1
        self.start()

    def end(self) -> None:
        """From another thread: the request in hand is given up at once and no process follows."""
        self._ended = True
        self._kill()

    def stop(self) -> None:
        """The process and its children are gone when this returns."""
        self._kill()
        if self.process is not None:
            self._socket.close()

    def _kill(self) -> None:
        with self._lock:
            if self.process is not None and self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def _is_reply(reply: object, number: int) -> bool:
    """Whether it is the reply to this request, in the form of child/__main__.py."""
    if not isinstance(reply, dict) or reply.get("number") != number:
        return False
    if "reward" not in reply:
        return isinstance(reply.get("reason"), str)
    return isinstance(reply["reward"], float) and isinstance(reply.get("answer"), str | None)
