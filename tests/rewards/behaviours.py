"""A reward of every temper, chosen by the question; runs inside grading processes only."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def reward(question, answer, completion, finish_reason, data):
    return globals()[question](**data)


def seven(question, answer, completion, finish_reason, data):
    return completion == "\\boxed{7}"


def value(value):
    return value


def slow(seconds, value=1.0):
    time.sleep(seconds)
    return value


def wait_for(file):
    while not Path(file).exists():
        time.sleep(0.01)
    return 1.0


def endless_loop():
    while True:
        pass


def one_long_c_call():
    return re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter for years


def memory_bomb():
    return len(bytearray(2**34))


def slow_memory_bomb():
    kept = []
    while True:
        kept.append(bytes(2**20))


def endless_recursion():
    return endless_recursion() + 1


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    os._exit(0)


def exit_python():
    sys.exit("enough")


def fail():
    raise ValueError("the first line\nthe second")


def fail_silently():
    raise ValueError


def print_a_lot():
    print('{"number": 1, "reward": 0.0}\n' * 10_000, flush=True)
    os.write(1, b"to the descriptor\n")
    os.write(2, b"to the other\n")
    return float(sys.stdin.read() == "")


def _protocol():
    return [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]


def garbage_to_the_trainer(text):
    for fd in _protocol():
        os.write(fd, text.encode())
    return 1.0


def garbage_without_end():
    while True:
        for fd in _protocol():
            os.write(fd, b"x" * 4096)


def half_a_line():
    garbage_to_the_trainer('{"number":')
    time.sleep(600)


def children(generations, each, record, then):
    """A tree of processes; each notes its id, all sleep."""
    for _ in range(each):
        if os.fork() == 0:
            if generations > 1:
                children(generations - 1, each, record, "return")
            with open(record, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
    expected = sum(each**generation for generation in range(1, generations + 1))
    while then != "return" and len(Path(record).read_text().split()) < expected:
        time.sleep(0.01)
    if then == "hang":
        time.sleep(600)
    if then == "crash":
        crash()
    return 1.0


def fork_and_go_on_in_both():
    os.fork()
    return 1.0


def program(record):
    process = subprocess.Popen(["sleep", "600"])
    Path(record).write_text(str(process.pid))
    process.wait()


async def asynchronous(question, answer, completion, finish_reason, data):
    await asyncio.sleep(0.01)
    if data.get("fail"):
        raise ValueError("too late")
    await asyncio.sleep(data.get("seconds", 0))
    return data.get("reward", 1.0), "found it"


class Nameless(Exception):
    def __str__(self):
        raise ValueError("no words")


def raise_by_name(name):
    raise {"interrupt": KeyboardInterrupt, "cancelled": asyncio.CancelledError, "nameless": Nameless}[name]


def answer_of(text, times=1):
    return 1.0, text * times


KEPT = []


def keep(megabytes):
    KEPT.append(bytearray(megabytes * 2**20))
    return float(len(KEPT))
