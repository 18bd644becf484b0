"""A process that trains and is killed at a chosen instant. Run as a script it imports everything once and forks a child
for each request, since importing takes longer than the training.

Requests on standard input, one JSON object a line: {"config": dict, "resume": bool, "kill": how or null}; the reply is
{"status": wait status of the child, "seconds": how long it lived}. How to kill: {"after": seconds} by the parent, or
{"at": "module:name", "call": n, "when": "before" | "middle" | "after"} by the child itself, around its n-th call.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(at: str, call: int, when: str) -> None:
    """Replace `module:name` (name may be dotted) by a function that dies around its `call`-th call."""
    module, _, path = at.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    real = getattr(owner, name)
    count = 0

    def deadly(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call and when == "before":
            die()
        result = real(*args, **kwargs)
        if count == call:
            die()
        return result

    setattr(owner, name, deadly)


def half_a_line(call: int) -> None:
    """Die with half of the `call`-th line of metrics.jsonl on disk."""
    from spiral_fast.record import recorder

    real, count = recorder.os.fsync, 0

    def deadly(descriptor):
        nonlocal count
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith("metrics.jsonl"):
            count += 1
            if count == call:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - 40)
                die()
        return real(descriptor)

    recorder.os.fsync = deadly


def child(request: dict) -> None:
    from spiral_fast import train
    from spiral_fast.config import Config

    train.write_report = lambda run: (run / "report.html").touch()  # half of so short a run's time; reads, never writes
    kill = request["kill"] or {}
    if "at" in kill:
        arm(kill["at"], kill["call"], kill["when"])
    if "half_a_line" in kill:
        half_a_line(kill["half_a_line"])
    train.train(Config.model_validate(request["config"]), resume=request["resume"])


def serve() -> None:
    import torch

    import spiral_fast.train  # noqa: F401
    from spiral_fast.problems import parts  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                log = os.open(Path(request["config"]["run_dir"] + ".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                child(request)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        seconds = (request["kill"] or {}).get("after")
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)  # no harm to one that has ended: it is not waited for yet
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status, "seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    serve()
