"""Which processes of a server are left."""

from __future__ import annotations

import time

import psutil


def family(pid: int) -> list[psutil.Process]:
    """A process and all it has started, directly or not."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[str]:
    """Names of those that still run; a zombie does not."""
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:80] or process.name())
        except psutil.NoSuchProcess:
            pass
    return left


def none_left(processes: list[psutil.Process], within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while left := alive(processes):
        if time.monotonic() > end:
            print("still there:", left)
            return False
        time.sleep(0.1)
    return True
