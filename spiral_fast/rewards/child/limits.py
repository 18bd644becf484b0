"""The limits a grading process gives itself; the deadline is the trainer's, who kills the process from outside."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import threading
from pathlib import Path

MORE_TASKS = 4096  # processes and threads the user may have beyond those at start: where a fork bomb ends


def prepare() -> None:
    """No core dump when a limit ends the process; where memory runs out, the kernel ends it before the trainer."""
    set_soft(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # some containers show /proc read-only
            Path("/proc/self/oom_score_adj").write_text("1000")


def limit(memory_mb: int, timeout_s: float, threads: int = 1) -> None:
    """Allow the next grading `memory_mb` above what the process holds now, and CPU time well above its deadline.

    CPU time ends what computes on after the trainer died. Only Linux limits memory: elsewhere a grading that eats it
    ends at its deadline.
    """
    if sys.platform == "linux":
        set_soft(resource.RLIMIT_AS, size() + memory_mb * 2**20)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    set_soft(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + timeout_s * threads) + 2)


def size() -> int:
    """Address space of this process, bytes; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_processes() -> None:
    """A bound on new processes and threads. The kernel counts all of the user's and exempts root."""
    if sys.platform == "linux":
        set_soft(resource.RLIMIT_NPROC, _tasks() + MORE_TASKS)


def end_with(trainer: socket.socket) -> None:
    """Kill this process and its children as soon as the other end of the socket is gone, whatever is running."""

    def watch() -> None:
        poll = select.poll()
        poll.register(trainer, 0)  # hanging up is always reported
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def set_soft(kind: int, wanted: int) -> None:
    """The soft limit becomes `wanted`, or the hard limit where that is lower: only root may raise a hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _tasks() -> int:
    """Processes and threads of this user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
        except OSError:  # ended meanwhile
            pass
    return count
