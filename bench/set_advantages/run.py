"""Credits of many problems at the paper's shape (8 traces, 4 sets of 4, 4 aggregations, both gates), every backend.

`spiral-fast bench set_advantages`, or `python -m bench.set_advantages.run [--problems N] [--device cuda]`. Best of the
rounds; on a CPU, seconds of one thread, checks of the input included.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch

from spiral_kernels import available_backends, force_backend, set_advantages

ROUNDS = 3


class Row(NamedTuple):
    backend: str
    problems: int
    seconds: float


def inputs(problems: int, device: str) -> tuple[tuple, dict]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    choices = torch.combinations(torch.arange(8), 4)  # the unordered sets of 4 of 8 traces
    chosen = torch.randint(0, len(choices), (problems, 4), generator=generator)
    lengths = {
        "search_length": integers(512, 4097, problems, 8),
        "aggregation_length": integers(512, 4097, problems, 4, 4),
    }
    targets = {"search_target": 3072, "aggregation_target": 3072}
    return (integers(0, 2, problems, 4, 4).float(), choices[chosen].to(device), 8), lengths | targets


def run(problems: int = 1_000_000, device: str = "cpu") -> list[Row]:
    """Measure, print the table, return it. Raises AssertionError where a backend has other zeros."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    arguments, gates = inputs(problems, device)
    rows, zeros = [], None
    for backend, why_not in available_backends("set_advantages", device).items():
        if why_not:
            print(f"{backend:8} left out: {why_not}")
            continue
        force_backend(backend, "set_advantages")
        seconds = []
        for _ in range(ROUNDS):
            begin = time.process_time() if device == "cpu" else time.perf_counter()
            found = set_advantages(*arguments, **gates)
            found.search[0, 0].item()  # waits for a GPU
            seconds.append((time.process_time() if device == "cpu" else time.perf_counter()) - begin)
        force_backend(None, "set_advantages")
        zeros = found.search == 0 if zeros is None else zeros
        assert torch.equal(found.search == 0, zeros), f"{backend} has other zeros"
        rows.append(Row(backend, problems, min(seconds)))
        print(f"{backend:8} {problems:10,} problems {min(seconds):8.3f} s", flush=True)
    torch.set_num_threads(threads)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    run(**vars(parser.parse_args()))
