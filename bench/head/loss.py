"""A policy loss and its gradient by the hidden states, frozen head, beside its peers: seconds over the two GEMMs' own.

`python -m bench.head.loss --threads 1`. The peers' log-probs are those of peers.py, their loss `policy_loss`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.head.peers import LogProb, peers
from bench.head.run import CHECKED_ROWS, Inputs, _gemm, _peak_mb, make_inputs
from spiral_kernels import available_backends, force_backend, linear_logprob, linear_policy_loss, policy_loss

Loss = Callable[[Inputs, Tensor], Tensor]
SETTINGS = {"loss": "ppo_clip", "clip": (0.2, 0.28)}


class Row(NamedTuple):
    name: str
    dtype: str
    seconds: float
    over_floor: float  # seconds / those of two GEMMs
    peak_mb: float  # beyond inputs
    d_hidden_error: float  # relative, of the first rows


def of_logp(logp: LogProb) -> Loss:
    def loss(inputs: Inputs, rollout_logp: Tensor) -> Tensor:
        found = logp(inputs.hidden, inputs.weight, inputs.targets).float()
        tokens = torch.arange(len(found) + 1)
        return policy_loss(found, rollout_logp, inputs.d_logp, tokens, **SETTINGS).loss

    return loss


def ours(backend: str) -> Loss:
    def loss(inputs: Inputs, rollout_logp: Tensor) -> Tensor:
        force_backend(backend, "linear_policy_loss")
        try:
            rows = inputs.targets, inputs.d_logp, rollout_logp, torch.ones_like(rollout_logp)
            return linear_policy_loss(inputs.hidden, inputs.weight, *rows, **SETTINGS).loss
        finally:
            force_backend(None, "linear_policy_loss")

    return loss


def losses(device: str = "cpu") -> dict[str, Loss]:
    able = available_backends("linear_policy_loss", device)
    found = {f"linear_policy_loss, {b}": ours(b) for b in able if able[b] is None and b != "reference"}
    return found | {f"{name} + policy_loss": of_logp(logp) for name, (logp, _gemms) in peers(device).items()}


def step(loss: Loss, inputs: Inputs, rollout_logp: Tensor) -> Tensor:
    """Forward and backward: d_hidden."""
    return torch.autograd.grad(loss(inputs, rollout_logp), inputs.hidden)[0]


def run(tokens: int = 2048, size: int = 576, vocabulary: int = 49152, threads: int = 1, rounds: int = 3) -> list[Row]:
    """Every peer at T x H x V in float32 and bfloat16; best of `rounds`, the peers taking turns.

    One thread: CPU seconds, so that other load does not count; else wall.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(f"loss: T={tokens} H={size} V={vocabulary}, {threads} thread(s), {'CPU' if threads == 1 else 'wall'} seconds")
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        table += _measure(make_inputs(tokens, size, vocabulary, dtype), rounds, clock)
    torch.set_num_threads(before)
    return table


def _measure(inputs: Inputs, rounds: int, clock: Callable[[], float]) -> list[Row]:
    with torch.no_grad():
        logp = linear_logprob(*inputs[:3]).logp
    rollout_logp = logp + 0.2 * inputs.d_logp.flip(0)  # ratios on both sides of the clip

    def seconds_of(function, *args) -> float:
        start = clock()
        function(*args)
        return clock() - start

    times: dict[str, list[float]] = {name: [] for name in losses()}
    gemm = []
    for _ in range(rounds):
        gemm.append(seconds_of(_gemm, inputs))
        for name, loss in losses().items():
            times[name].append(seconds_of(step, loss, inputs, rollout_logp))

    floor, dtype = 2 * min(gemm), str(inputs.hidden.dtype).removeprefix("torch.")
    print(f"{dtype}: two GEMMs {floor:.2f} s")
    print(f"  {'':42} {'seconds':>8} {'/ 2 GEMMs':>10} {'peak MB':>8} {'dh err':>8}")
    first = Inputs(
        inputs.hidden[:CHECKED_ROWS].detach().double().requires_grad_(),
        inputs.weight.double(),
        *(x[:CHECKED_ROWS] for x in inputs[2:]),
    )
    truth, table = step(ours("reference"), first, rollout_logp[:CHECKED_ROWS]), []
    for name, loss in losses().items():
        peak, d_hidden = _peak_mb(step, loss, inputs, rollout_logp)
        error = ((d_hidden[:CHECKED_ROWS].double() - truth).norm() / truth.norm()).item()
        row = Row(name, dtype, min(times[name]), min(times[name]) / floor, peak, error)
        print(f"  {name:42} {row.seconds:8.2f} {row.over_floor:10.2f} {peak:8.0f} {error:8.1e}")
        table.append(row)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in {"tokens": 2048, "size": 576, "vocabulary": 49152, "threads": 1, "rounds": 3}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    run(**vars(parser.parse_args()))
