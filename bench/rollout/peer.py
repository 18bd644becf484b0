"""One other engine, in its own environment and processes: what `bench.rollout.aggregation` starts.

It reads a job (JSON) from standard input, samples the small stage once, then the whole one `rounds` times, and prints
one JSON line. Needs psutil and the engine alone. CPU seconds are summed over the engine's processes; `model` is the
one of them that took most, which runs the model, and waits for nobody.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import psutil

Sample = Callable[[list[list[int]], list[list[int]]], tuple[list[int], int]]


def serve(make: Callable[[dict], Sample]) -> None:
    """make(job) starts the engine and returns a function: from an empty cache, prompts and the lengths of each one's
    traces -> tokens sampled of each trace, prompt tokens computed."""
    job = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # engines print
    sample = make(job)
    sample(job["prompts"][:1], job["lengths"][:1])
    rounds = []
    for _ in range(job["rounds"]):
        before, start = _cpu_seconds(), time.perf_counter()
        found, computed = sample(job["prompts"], job["lengths"])
        wall, after = time.perf_counter() - start, _cpu_seconds()
        taken = [after[process] - before.get(process, 0.0) for process in after]
        rounds.append({"cpu": sum(taken), "model": max(taken), "wall": wall, "sampled": found, "computed": computed})
    print(json.dumps(rounds), file=out, flush=True)


def _cpu_seconds() -> dict[int, float]:
    here = psutil.Process()
    seconds = {}
    for process in (here, *here.children(recursive=True)):
        times = process.cpu_times()
        seconds[process.pid] = times.user + times.system
    return seconds
