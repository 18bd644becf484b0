"""A grader whose gradings run in processes: `reward.workers` of them, each with a thread of the trainer that waits."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from spiral_fast.config import RewardConfig
from spiral_fast.interrupts import interrupts_held, result_of
from spiral_fast.rewards.grader import CORRECT, COULD_NOT_GRADE, WRONG, Grader, Verdict
from spiral_fast.rewards.process import GradingProcess


class PoolGrader(Grader):
    """Starts the processes on entry and ends them on exit."""

    def __init__(self, config: RewardConfig, task: dict[str, str], trial: list[str], correct_at: float = 1.0):
        """`task`, `trial`: of GradingProcess. `correct_at`: the reward from which an answer counts as correct."""
        n = config.workers or min(
            4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        self._processes = [GradingProcess(config, task, trial) for _ in range(n)]
        self._correct_at = correct_at
        self._free: queue.SimpleQueue[GradingProcess] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._held: WeakValueDictionary[Hashable, Future[Verdict]] = WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def restarts(self) -> int:
        """Processes that were replaced: killed at the deadline, died, or out of memory."""
        return sum(process.restarts for process in self._processes)

    def __enter__(self) -> PoolGrader:
        self._threads = ThreadPoolExecutor(len(self._processes), "grading")
        try:
            for started in [self._threads.submit(process.start) for process in self._processes]:
                result_of(started)
        except BaseException:
            self.__exit__()
            raise
        for process in self._processes:
            self._free.put(process)
        return self

    def __exit__(self, *_) -> None:
        with interrupts_held():  # a second Ctrl-C: until this is done the threads would wait for their answers
            for process in self._processes:
                process.end()
            self._threads.shutdown(cancel_futures=True)
            for process in self._processes:
                process.stop()
            self._threads = None

    def _submit(self, key: Hashable, request: list, answer: str | None) -> Future[Verdict]:
        """The verdict on `request`, sent to a process once for each `key` that is held.

        `answer`: what was extracted, unless the process says it found another.
        """
        if self._threads is None:
            raise RuntimeError("the grader is closed: use it inside `with make_grader(config) as grader`")
        with self._lock:
            verdict = self._held.get(key)
            if verdict is None or verdict.cancelled():
                verdict = self._held[key] = self._threads.submit(self._grade, request, answer)
        return verdict

    def _grade(self, request: list, answer: str | None) -> Verdict:
        process = self._free.get()
        try:
            reply = process.ask(request)
        finally:
            self._free.put(process)
        if "reward" not in reply:
            return Verdict(0.0, COULD_NOT_GRADE, answer, reply["reason"])
        reward = reply["reward"]
        return Verdict(reward, CORRECT if reward >= self._correct_at else WRONG, reply.get("answer", answer) or None)
