"""Seconds of a SPIRAL step by phase, every row computed alone and every token once.

`python -m bench.step [--config FILE] [--steps N] [--wall] [KEY=VALUE]...`

Two short trainings of the same seed on one thread, taken from their metrics.jsonl, median over the steps after the
first, which compiles. CPU seconds of the trainer's process, so that other load counts little (graders are processes of
their own: what they take is not in it), or with --wall wall seconds. `other` is what no phase accounts for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from spiral_fast.config import load_config
from spiral_fast.record import stopwatch
from spiral_fast.train import train

PHASES = ("rollout", "reward", "credit", "learn")
MODES = {"none": "each row alone", "tree": "every token once"}


def run(config: str, steps: int, overrides: list[str], *, wall: bool = False) -> dict[str, dict[str, float]]:
    """mode -> phase -> seconds, printed as one table."""
    if not wall:
        stopwatch.time = SimpleNamespace(perf_counter=time.process_time)
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for sharing in MODES:
            changes = [f"learner.steps={steps}", f"learner.sharing={sharing}", f"run_dir={folder}/{sharing}"]
            quiet = ["learner.self_check=false", "problems.eval_size=2", "evaluate.samples=2", "evaluate.rsa.steps=0"]
            quiet += ["evaluate.pass_at=[1]", "evaluate.majority_at=[1]", "record.writers=[]", "threads=1"]
            made = train(load_config(config, [*changes, *quiet, *overrides]))
            rows = [json.loads(line) for line in Path(made, "metrics.jsonl").read_text().splitlines()][1:]
            table[sharing] = {name: median(row.get(f"time/{name}", 0.0) for row in rows) for name in (*PHASES, "step")}
    print(
        f"{'':20}"
        + "".join(f"{name:>10}" for name in (*PHASES, "other", "step"))
        + "   {'wall' if wall else 'CPU'} seconds"
    )
    for sharing, of in table.items():
        other = of["step"] - sum(of[name] for name in PHASES)
        figures = [*(of[name] for name in PHASES), other, of["step"]]
        print(
            f"{MODES[sharing]:20}"
            + "".join(f"{value:10.3f}" for value in figures)
            + f"   other {other / of['step']:.0%}"
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--wall", action="store_true")
    arguments = parser.parse_args()
    run(arguments.config, arguments.steps, arguments.overrides, wall=arguments.wall)
