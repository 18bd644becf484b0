"""A grading process: JSON lines over one socket, given by its file descriptor.

In:  the task {"kind": "math" | "function", "function", "memory_mb", "timeout_s"}, then lines [number, request].
Out: "ready" or {"error": why}, then for each request {"number", "reward"} or, when it could not be graded,
     {"number", "reason"}; "answer" is there when the reward extracted one itself.

Standard input and output are the null device: what a reward prints never meets the protocol. The process ends, and
takes its children with it, when the socket closes, which it does when the trainer dies.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from spiral_fast.by_name import CannotLoad, first_line
from spiral_fast.rewards.child import limits
from spiral_fast.rewards.child.function import load_function
from spiral_fast.rewards.child.math_answer import math_reward


def reward_of(task: dict) -> Callable[..., dict]:
    if task["kind"] == "math":
        math_reward("\\frac{1}{2}", "0.5 + x")  # imports and builds the parser before the first deadline runs
        return math_reward
    return load_function(task["function"])


def serve(connection: socket.socket) -> None:
    lines = connection.makefile("r", encoding="utf-8")

    def send(message: object) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    task = json.loads(lines.readline())
    logging.disable(logging.CRITICAL)
    try:
        reward = reward_of(task)
    except CannotLoad as error:
        return send({"error": str(error)})
    except Exception as error:
        return send({"error": first_line(error)})
    limits.limit_processes()
    send("ready")
    me, held = os.getpid(), limits.size()
    for line in lines:
        number, request = json.loads(line)
        limits.limit(task["memory_mb"], task["timeout_s"], threads=1 if task["kind"] == "math" else os.cpu_count())
        try:
            reply = reward(*request)
        except (MemoryError, RecursionError) as error:
            reply = {"reason": type(error).__name__}
        if os.getpid() != me:  # a child that the reward forked and did not end
            os._exit(0)
        send({"number": number} | reply)
        broken = reply.get("reason", "").startswith(("MemoryError", "RecursionError"))
        if broken or limits.size() > held + task["memory_mb"] * 2**20:  # it keeps more from call to call
            return  # whoever asks next starts a fresh process


if __name__ == "__main__":
    trainer = socket.socket(fileno=int(sys.argv[1]))
    trainer.set_inheritable(False)
    limits.prepare()
    limits.end_with(trainer)
    try:
        serve(trainer)
    finally:
        os.killpg(0, signal.SIGKILL)  # this process and all its children; it leads a session of its own
