"""The head's forward and backward, frozen weight, beside its peers: seconds over its GEMMs' own, memory, errors.

`spiral-fast bench head`, or `python -m bench.head.run --threads 2 --json head.json`. One run, the same inputs; the
peers take turns. The floor of a method is its GEMMs alone, in cache-sized tiles, measured in the same turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.head.peers import SEQUENCE, Inputs, Method, left_out, log_probs, losses, our_loss
from spiral_kernels import linear_logprob

GEMM_TILE = 1024
CHECKED_ROWS = 64  # rows whose result is compared with float64


class Row(NamedTuple):
    what: str  # log-probs, or a policy loss
    name: str
    dtype: str
    tokens_per_s: float
    seconds: float
    gemms: int
    over_floor: float  # seconds / those of its GEMMs
    over_two_gemms: float
    peak_mb: float  # beyond inputs
    d_hidden_error: float  # relative, of the first rows


def make_inputs(tokens: int, size: int, vocabulary: int, dtype: torch.dtype) -> Inputs:
    """SmolLM2-like scales: logits of a few nats."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=generator) * 0.1).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    advantages = torch.randn(tokens // SEQUENCE, generator=generator).repeat_interleave(SEQUENCE)
    with torch.no_grad():
        logp = linear_logprob(hidden, weight, targets).logp.float()
    return Inputs(hidden, weight, targets, advantages, logp + 0.2 * torch.randn(tokens, generator=generator))


def of_log_probs(method: Method, inputs: Inputs) -> Tensor:
    """Forward and backward: d_hidden of the sum of log-prob times advantage over tokens."""
    found = method.function(*inputs[:3])
    d_logp = (inputs.advantages / len(inputs.targets)).to(found.dtype)
    return torch.autograd.grad(found, inputs.hidden, d_logp)[0]


def of_loss(method: Method, inputs: Inputs) -> Tensor:
    """Forward and backward: d_hidden."""
    return torch.autograd.grad(method.function(inputs), inputs.hidden)[0]


KINDS = {"log-probs": (of_log_probs, log_probs), "policy loss": (of_loss, losses)}


def run(
    tokens: int = 2048, size: int = 576, vocabulary: int = 49152, threads: int = 1, rounds: int = 3, json_to: str = ""
) -> list[Row]:
    """Measure everything at T x H x V (default: SmolLM2-135M) in float32 and bfloat16, print the tables, return them.

    Medians of `rounds`. One thread: CPU seconds, so that other load does not count; else wall.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(f"head: T={tokens} H={size} V={vocabulary}, {threads} thread(s), {'CPU' if threads == 1 else 'wall'} seconds")
    for name, reason in left_out().items():
        print(f"left out: {name}: {reason}")
    table: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(tokens, size, vocabulary, dtype)
        for what in KINDS:
            table += _measure(what, inputs, rounds, clock)
    torch.set_num_threads(before)
    if json_to:
        found = {
            "torch": torch.__version__,
            "threads": threads,
            "rounds": rounds,
            "T": tokens,
            "H": size,
            "V": vocabulary,
        }
        Path(json_to).write_text(json.dumps(found | {"rows": [row._asdict() for row in table]}, indent=1) + "\n")
    return table


def _measure(what: str, inputs: Inputs, rounds: int, clock: Callable[[], float]) -> list[Row]:
    step, methods_of = KINDS[what]
    methods, dtype = methods_of(), str(inputs.hidden.dtype).removeprefix("torch.")
    results = {name: step(method, inputs) for name, method in methods.items()}  # warms up, compiles
    truth = _truth(what, inputs)

    def seconds_of(function, *args) -> float:
        start = clock()
        function(*args)
        return clock() - start

    times: dict[str, list[float]] = {name: [] for name in methods}
    gemm = []
    for _ in range(rounds):
        gemm.append(seconds_of(_gemm, inputs))
        for name, method in methods.items():
            times[name].append(seconds_of(step, method, inputs))

    one, tokens, table = statistics.median(gemm), len(inputs.targets), []
    print(f"{what}, {dtype}: one GEMM {one:.2f} s")
    print(f"  {'':50} {'tokens/s':>8} {'seconds':>8} {'/ GEMMs':>12} {'peak MB':>8} {'dh err':>8}")
    for name, method in methods.items():
        seconds = statistics.median(times[name])
        peak, _ = _peak_mb(step, method, inputs)
        error = ((results[name][:CHECKED_ROWS].double() - truth).norm() / truth.norm()).item()
        if "entropy bonus" in name:
            error = float("nan")  # another loss
        floors = seconds / (method.gemms * one), seconds / (2 * one)
        row = Row(what, name, dtype, tokens / seconds, seconds, method.gemms, *floors, peak, error)
        over = f"{row.over_floor:.2f} of {method.gemms}"
        print(f"  {name:50} {row.tokens_per_s:8.0f} {seconds:8.2f} {over:>12} {peak:8.0f} {error:8.1e}", flush=True)
        table.append(row)
    return table


def _gemm(inputs: Inputs) -> None:
    """One T x H x V product in cache-sized tiles written to one buffer: the fastest a head could form the logits."""
    out = torch.empty(GEMM_TILE, GEMM_TILE, dtype=inputs.weight.dtype)
    for h in inputs.hidden.detach().split(GEMM_TILE):
        for block in inputs.weight.split(GEMM_TILE):
            torch.mm(h, block.t(), out=out[: h.shape[0], : block.shape[0]])


def _truth(what: str, inputs: Inputs) -> Tensor:
    """d_hidden of the first rows in float64, of a loss over all tokens."""
    hidden = inputs.hidden[:CHECKED_ROWS].detach().double().requires_grad_()
    weight, share = inputs.weight.double(), CHECKED_ROWS / len(inputs.targets)
    first = Inputs(hidden, weight, *(x[:CHECKED_ROWS] for x in inputs[2:]))
    if what == "policy loss":
        return of_loss(Method(our_loss("reference"), 2), first) * share

    def logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return (hidden @ weight.t()).log_softmax(1).gather(1, targets[:, None])[:, 0]

    return of_log_probs(Method(logp, 2), first) * share


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
    parser.add_argument("--json", dest="json_to", default="", help="file to write the rows to")
    options = parser.parse_args()
    if options.tokens % SEQUENCE:
        parser.error(f"--tokens {options.tokens}: must be a multiple of {SEQUENCE}, the length of a sequence")
    run(**vars(options))
