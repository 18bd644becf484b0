"""tree_attention's forward and backward beside its peers, on trees of SPIRAL's shape and of many short nodes.

`python -m bench.tree_attention.run [--rounds N] [--heads SmolLM2]`. CPU seconds of one thread, medians of rounds in
which the peers take turns. The floor is the time of a plain GEMM of torch for the FLOPs of the visited area (two
products forward, five backward). "of dense": speed-up over SDPA with a dense mask, and in brackets over what skipping
the hidden area would give, dense area / visited area.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.head.run import _peak_mb
from bench.tree_attention.cases import HEADS, TREES, Case, make_case
from bench.tree_attention.peers import Result, in_tree, peers

DENSE = "SDPA, dense mask"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the largest entry


class Row(NamedTuple):
    tree: str
    heads: str
    dtype: str
    name: str
    forward: float  # seconds
    backward: float  # nan where it has none
    peak_mb: float  # of both beyond inputs and masks
    forward_of_dense: float  # speed-up over SDPA with a dense mask
    backward_of_dense: float
    dense_over_visited: float


def run(rounds: int = 5, heads: str = "") -> list[Row]:
    """Measure everything, print the tables, return them. Raises AssertionError where two peers disagree."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    table = []
    for head_shape in [heads] if heads else HEADS:
        for name, tree in TREES.items():
            if head_shape != "SmolLM2" and "64..480" in name:
                continue  # a dense mask takes minutes
            for dtype in (torch.float32, torch.bfloat16):
                table += _measure(name, head_shape, make_case(tree(), head_shape, dtype), rounds)
    torch.set_num_threads(before)
    torch.compiler.reset()
    return table


def _measure(tree: str, heads: str, case: Case, rounds: int) -> list[Row]:
    prepared = {name: peer(case) for name, peer in peers().items()}
    truth = None
    for name, function in prepared.items():  # also warms up
        found = _results(case, function())
        truth = found if truth is None else truth
        if case.q.dtype == torch.bfloat16:  # torch sums gradients of many calls in bfloat16: only out is comparable
            found = found[:1]
        for mine, true in zip(found, truth, strict=False):
            assert (mine - true).abs().max() <= TOLERANCE[case.q.dtype] * true.abs().max(), f"{name} differs on: {tree}"
    forward: dict[str, list[float]] = {name: [] for name in prepared}
    backward: dict[str, list[float]] = {name: [] for name in prepared}
    gemm = []
    for _ in range(rounds):
        gemm.append(_gemm_seconds(case.q.dtype))
        for name, function in prepared.items():
            seconds, (out, inputs, d_out) = _timed(function)
            forward[name].append(seconds)
            backward[name].append(_timed(torch.autograd.grad, out, inputs, d_out)[0] if inputs else float("nan"))

    dtype = str(case.q.dtype).removeprefix("torch.")
    floor = case.forward_flops / (2 * 1024**3 / statistics.median(gemm))
    ratio, rows = case.dense_over_visited, case.tree.computed_tokens
    print(f"{tree}: {rows:,} rows, {len(case.tree.start):,} nodes, {heads} heads, {dtype}; dense / visited {ratio:.1f}")
    print(f"  {'':34} {'forward ms':>10} {'of dense':>12} {'backward ms':>12} {'of dense':>12} {'peak MB':>8}")
    print(f"  {'floor: a GEMM for the visited area':34} {1e3 * floor:10.1f} {'':12} {2.5e3 * floor:12.1f}")
    table = []
    for name, function in prepared.items():
        f, b = statistics.median(forward[name]), statistics.median(backward[name])
        of_dense = statistics.median(forward[DENSE]) / f, statistics.median(backward[DENSE]) / b
        peak, _ = _peak_mb(_step, function)
        both = [f"{x:6.2f} ({x / ratio:.2f})" for x in of_dense]
        print(f"  {name:34} {1e3 * f:10.1f} {both[0]:>12} {1e3 * b:12.1f} {both[1]:>12} {peak:8.0f}", flush=True)
        table.append(Row(tree, heads, dtype, name, f, b, peak, *of_dense, ratio))
    return table


def _step(function: Callable[[], Result]) -> None:
    out, inputs, d_out = function()
    if inputs:
        torch.autograd.grad(out, inputs, d_out)


def _results(case: Case, result: Result) -> list[torch.Tensor]:
    """out, dq, dk, dv in the tree's rows; out alone without a backward."""
    out, inputs, d_out = result
    gradients = torch.autograd.grad(out, inputs, d_out) if inputs else ()
    both = [in_tree(case, out.detach(), summed=False), *(in_tree(case, g, summed=True) for g in gradients)]
    return [x.float() for x in both]


def _gemm_seconds(dtype: torch.dtype) -> float:
    a = torch.ones(1024, 1024, dtype=dtype)
    return _timed(torch.mm, a, a)[0]


def _timed(function: Callable, *arguments) -> tuple:
    begin = time.process_time()
    result = function(*arguments)
    return time.process_time() - begin, result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", choices=["", *HEADS], default="")
    run(**vars(parser.parse_args()))
