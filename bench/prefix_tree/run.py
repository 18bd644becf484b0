"""Building prefix trees: tokens per second of PrefixTree beside its plain version and its peers.

`spiral-fast bench prefix_tree`, or `python -m bench.prefix_tree.run [--problems N] [--rounds N]`. CPU seconds of one
thread, best of the rounds, tokens counted in every trace that has them.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from bench.prefix_tree.peers import Builder, builders
from bench.prefix_tree.shapes import Batch, hard, spiral


class Row(NamedTuple):
    shape: str
    name: str
    tokens: int  # N, each counted in every trace
    distinct: int  # T
    tokens_per_s: float


def run(problems: int = 16, rounds: int = 3) -> list[Row]:
    """Measure everything, print the table, return it. Raises AssertionError where two builders disagree."""
    print(f"{'':39} {'':36} {'tokens':>10} {'distinct':>10} {'M tokens/s':>11}")
    table = []
    for shape, batch in {f"SPIRAL, {problems} problems": spiral(problems), **hard()}.items():
        truth = None
        for name, builder in builders().items():
            row, found = _measure(shape, name, builder, batch, rounds)
            truth = found if truth is None else truth
            assert same_rows(found, truth), f"{name} disagrees on: {shape}"
            table.append(row)
    fastest, builder = next(iter(builders().items()))
    table.append(_measure(f"SPIRAL, {4 * problems} problems", fastest, builder, spiral(4 * problems), rounds)[0])
    return table


def same_rows(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two numberings give the same row to the same tokens."""
    pairs = len(np.unique(one * (other.max(initial=0) + 1) + other))
    return pairs == len(np.unique(one)) == len(np.unique(other))


def _measure(shape: str, name: str, builder: Builder, batch: Batch, rounds: int) -> tuple[Row, np.ndarray]:
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        distinct, rows = builder(batch)
        seconds.append(time.process_time() - begin)
    row = Row(shape, name, len(batch.tokens), distinct, len(batch.tokens) / min(seconds))
    print(f"{shape:39} {name:36} {row.tokens:10,} {distinct:10,} {row.tokens_per_s / 1e6:11.2f}", flush=True)
    return row, rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in {"problems": 16, "rounds": 3}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    run(**vars(parser.parse_args()))
