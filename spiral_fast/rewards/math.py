"""Mathematical answers by math-verify, each in a process that is killed from outside when its time is over.

math-verify's own time-outs are signals, which only work in the main thread and not inside one long C call; here they
are off. The rule: the last box of the completion (boxed.py) is compared with the reference answer; no box, or an empty
one, is wrong. The finish reason plays no part. math-verify reads plain words as products of their letters: for answers
that are words use reward.kind exact.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from weakref import WeakValueDictionary

from spiral_fast.config import ConfigError, RewardConfig
from spiral_fast.install import install_command
from spiral_fast.rewards.boxed import boxed_answer
from spiral_fast.rewards.grader import CORRECT, COULD_NOT_GRADE, WRONG, Grader, GraderFailed, Verdict
from spiral_fast.trace import Problem

START_S = 120.0  # seconds a worker may take to import math-verify, on a busy machine


class _Worker:
    """One warm math-verify process. Raises GraderFailed when it does not start."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self.ended = False
        self.start()

    def start(self) -> None:
        file = Path(__file__).with_name("worker.py")
        # -P: this folder's math.py must not stand for Python's. A session of its own: Ctrl-C is for the trainer.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(file), str(self.config.memory_mb), str(self.config.timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        if self.ended:  # while this one was being started
            self.process.kill()
        if self._reply(START_S) != "ready":
            self.stop()
            raise GraderFailed(
                f"a grading process did not start: run `{sys.executable} -c 'import math_verify'` to see why"
            )

    def _reply(self, seconds: float) -> str | None:
        """The next line; "" when the process died; None when it kept silent."""
        if not wait([self.process.stdout], seconds):
            return None
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, reference: str, answer: str) -> tuple[str, str]:
        """(verdict, reason). A process that fails in any way is replaced before this returns."""
        for _ in range(2):  # a process that is gone may not be this answer's fault; a second one is
            try:
                self.process.stdin.write(json.dumps([reference, answer]) + "\n")
                self.process.stdin.flush()
                reply = self._reply(self.config.timeout_s)
            except BrokenPipeError:
                reply = ""
            if reply:
                return tuple(json.loads(reply))
            if self.ended:
                raise RuntimeError("the math grader was interrupted")
            self.restart()
            if reply is None:
                return COULD_NOT_GRADE, f"no verdict on {answer[:80]!r} within {self.config.timeout_s} s"
        return COULD_NOT_GRADE, f"the grading process died on {answer[:80]!r}"

    def restart(self) -> None:
        self.stop()
        self.start()

    def end(self) -> None:
        """From another thread: the answer in hand is given up at once and no process follows."""
        self.ended = True
        self.process.kill()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass


class MathGrader(Grader):
    """Starts `reward.workers` processes on entry and ends them on exit. Raises ConfigError without math-verify."""

    def __init__(self, config: RewardConfig):
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"reward.kind: 'math' needs math-verify; run: {install_command('train')}")
        self.config = config
        self._workers: list[_Worker] = []
        self._free: queue.Queue[_Worker] = queue.Queue()
        self._threads: ThreadPoolExecutor | None = None
        self._pending: WeakValueDictionary[tuple, Future[Verdict]] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __enter__(self) -> MathGrader:
        with ThreadPoolExecutor(self.config.workers) as threads:
            self._workers = list(threads.map(_Worker, [self.config] * self.config.workers))
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(self.config.workers, "grading")
        return self

    def __exit__(self, *_) -> None:
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._workers, self._threads = [], None
        self._free = queue.Queue()

    def submit(self, problem: Problem, text: str, finish_reason: str) -> Future[Verdict]:
        if self._threads is None:
            raise RuntimeError("the math grader is closed: use it inside `with make_grader(config) as grader`")
        answer = self.answer(text)
        key = problem.answer, answer
        with self._lock:
            verdict = self._pending.get(key)
            if verdict is None or verdict.cancelled():
                verdict = self._pending[key] = self._threads.submit(self._grade, *key)
        return verdict

    def _grade(self, reference: str, answer: str | None) -> Verdict:
        if answer is None:
            return Verdict(0.0, WRONG, None)
        worker = self._free.get()
        try:
            verdict, reason = worker.ask(reference, answer)
        finally:
            self._free.put(worker)
        return Verdict(float(verdict == CORRECT), verdict, answer, reason)

    def answer(self, text: str) -> str | None:
        return boxed_answer(text)
