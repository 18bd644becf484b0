"""The head's forward and backward, frozen weight, beside its peers: tokens/s, peak memory, error against float64.

`spiral-fast bench head`, or `python -m bench.head.run --threads 2`.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench.head.peers import LogProb, peers

GEMM_TILE = 1024
CHECKED_ROWS = 64  # rows whose result is compared with float64


class Inputs(NamedTuple):
    hidden: torch.Tensor  # (T, H), requires a gradient
    weight: torch.Tensor  # (V, H), frozen
    targets: torch.Tensor  # (T,)
    d_logp: torch.Tensor  # (T,) float32


class Row(NamedTuple):
    name: str
    dtype: str
    tokens_per_s: float
    floor_tokens_per_s: float  # at the measured GEMM rate, its GEMMs alone
    peak_mb: float  # beyond inputs
    logp_error: float  # max |difference| from float64, nats
    d_hidden_error: float  # relative


def make_inputs(tokens: int, size: int, vocabulary: int, dtype: torch.dtype) -> Inputs:
    """SmolLM2-like scales: logits of a few nats."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=generator) * 0.1).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return Inputs(hidden, weight, targets, torch.randn(tokens, generator=generator))


def step(logp: LogProb, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward: log-probs and d_hidden."""
    found = logp(inputs.hidden, inputs.weight, inputs.targets)
    (d_hidden,) = torch.autograd.grad(found, inputs.hidden, inputs.d_logp.to(found.dtype))
    return found.detach(), d_hidden


def run(tokens: int = 2048, size: int = 576, vocabulary: int = 49152, threads: int = 1, rounds: int = 3) -> list[Row]:
    """Measure every peer at T x H x V (default: SmolLM2-135M) in float32 and bfloat16, print the table, return it.

    Best of `rounds`, the peers taking turns. One thread: CPU seconds, so that other load does not count; else wall.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(f"head: T={tokens} H={size} V={vocabulary}, {threads} thread(s), {'CPU' if threads == 1 else 'wall'} seconds")
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        table += _measure(make_inputs(tokens, size, vocabulary, dtype), rounds, clock)
    torch.set_num_threads(before)
    return table


def _measure(inputs: Inputs, rounds: int, clock: Callable[[], float]) -> list[Row]:
    (tokens, size), vocabulary = inputs.hidden.shape, inputs.weight.shape[0]
    dtype = str(inputs.hidden.dtype).removeprefix("torch.")

    def seconds_of(function, *args) -> float:
        start = clock()
        function(*args)
        return clock() - start

    gemm_s = min(seconds_of(_gemm, inputs) for _ in range(rounds))
    print(f"{dtype}: one GEMM {gemm_s:.2f} s ({2 * tokens * size * vocabulary / gemm_s / 1e9:.0f} GFLOP/s)")
    times = {name: [] for name in peers()}
    for _ in range(rounds):
        for name, (logp, _gemms) in peers().items():
            times[name].append(seconds_of(step, logp, inputs))

    print(f"  {'':28} {'tokens/s':>9} {'seconds':>8} {'GEMM floor':>11} {'peak MB':>8} {'logp err':>9} {'dh err':>8}")
    truth, table = _truth(inputs), []
    for name, (logp, gemms) in peers().items():
        seconds, floor = min(times[name]), gemms * gemm_s
        peak, (found, d_hidden) = _peak_mb(step, logp, inputs)
        logp_error = (found[:CHECKED_ROWS].double() - truth[0]).abs().max().item()
        d_hidden_error = ((d_hidden[:CHECKED_ROWS].double() - truth[1]).norm() / truth[1].norm()).item()
        table.append(Row(name, dtype, tokens / seconds, tokens / floor, peak, logp_error, d_hidden_error))
        print(
            f"  {name:28} {tokens / seconds:9.0f} {seconds:8.2f} {floor:9.2f} s {peak:8.0f} "
            f"{logp_error:9.1e} {d_hidden_error:8.1e}"
        )
    return table


def _gemm(inputs: Inputs) -> None:
    """One T x H x V product in cache-sized tiles written to one buffer: the fastest a head could form the logits."""
    out = torch.empty(GEMM_TILE, GEMM_TILE, dtype=inputs.weight.dtype)
    for h in inputs.hidden.detach().split(GEMM_TILE):
        for block in inputs.weight.split(GEMM_TILE):
            torch.mm(h, block.t(), out=out[: h.shape[0], : block.shape[0]])


def _truth(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and d_hidden of the first rows in float64."""
    hidden = inputs.hidden[:CHECKED_ROWS].detach().double().requires_grad_()
    log_p = (hidden @ inputs.weight.double().t()).log_softmax(1)
    logp = log_p.gather(1, inputs.targets[:CHECKED_ROWS, None])[:, 0]
    (d_hidden,) = torch.autograd.grad(logp, hidden, inputs.d_logp[:CHECKED_ROWS].double())
    return logp.detach(), d_hidden


def _peak_mb(function, *args):
    """Highest resident memory during the call beyond that before it (Linux with glibc), and the call's result."""
    ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back, or the call would reuse it unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_kb("VmRSS")
    result = function(*args)
    return (_status_kb("VmHWM") - before) / 1024, result


def _status_kb(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in {"tokens": 2048, "size": 576, "vocabulary": 49152, "threads": 1, "rounds": 3}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    run(**vars(parser.parse_args()))
