"""The worked evaluation of docs/evaluation.md: warm start, SPIRAL and GRPO on the demo task.

`python -m bench.evaluation` (after `make study`, which trains the two; about 10 minutes on one core) runs `spiral-fast
eval`, `compare` and `cross`, going on with what is there, and writes the pictures and tables of the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from spiral_fast.evaluate.compare import differences
from spiral_fast.evaluate.cross import heat_map
from spiral_fast.evaluate.plots import figures
from spiral_fast.evaluate.table import lines, number

STUDY = "runs/study/{}_lr0.0006_seed0/checkpoints/step_000160"
ALL = [
    "threads=1",
    "evaluate.samples=256",
    "evaluate.pass_at=[1, 2, 4, 8, 16, 32, 64, 128, 256]",
    "evaluate.majority_at=[4, 16, 64]",
    "evaluate.rsa=[{population: 8, set_size: 4, steps: 5}, {population: 16, set_size: 2, steps: 5}, "
    "{population: 32, set_size: 4, steps: 3}]",
]
LENGTHS = "evaluate.lengths=[6, 12, 18]"  # a trace of the demo has 18 words and its end: nothing is right before
VARIABLE = ["threads=1", "evaluate.lengths=[19, 25, 31, 37]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spiral", default=STUDY.format("spiral"), help="adapter")
    parser.add_argument("--grpo", default=STUDY.format("grpo"), help="adapter")
    parser.add_argument("--runs", type=Path, default=Path("runs/evaluation"), help="folder of the numbers and traces")
    parser.add_argument("--out", type=Path, default=Path("docs/evaluation"), help="folder of pictures and tables")
    arguments = parser.parse_args()
    adapters = {"base": None, "spiral": arguments.spiral, "grpo": arguments.grpo}
    runs, out = arguments.runs, arguments.out
    for label, adapter in adapters.items():
        chosen = ["--adapter", adapter] if adapter else []
        command("eval", "configs/demo.yaml", *ALL, LENGTHS, *chosen, "--out", runs / f"{label}.json", "--resume")
    command("eval", "configs/demo_variable.yaml", *VARIABLE, "--out", runs / "variable.json", "--resume")
    command("compare", *(f"{label}={runs / label}.json" for label in adapters), "--out", runs / "compare.html")
    sides = [
        part
        for side in ("--search", "--aggregation")
        for label, adapter in adapters.items()
        for part in (side, f"{label}={adapter}" if adapter else "base")
    ]
    command("cross", "configs/demo.yaml", *ALL, *sides, "--out", runs / "cross.json", "--resume")
    write({label: json.loads((runs / f"{label}.json").read_text()) for label in adapters}, runs, out)


def command(*words: object) -> None:
    words = [sys.executable, "-m", "spiral_fast.cli", *map(str, words)]
    if subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr).returncode:
        sys.exit(f"{' '.join(words)} failed")


def write(evaluations: dict[str, dict], runs: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    drawn = figures(evaluations) | {"cross": heat_map(json.loads((runs / "cross.json").read_text()))}
    drawn["lengths"] = figures({"base": json.loads((runs / "variable.json").read_text())})["lengths"]
    for name, figure in drawn.items():
        figure.savefig(out / f"{name}.png", dpi=90)
    found = differences(evaluations)
    rows = ["| | " + " | ".join(evaluations) + " |", "|---|" + "---|" * len(evaluations)]
    rows += ["| " + " | ".join([name, *cells]) + " |" for name, cells in lines(evaluations)]
    rows += ["", "| minus base | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for metric in next(iter(found.values())):
        pairs = [found[label][metric] for label in found]
        rows.append("| " + " | ".join([metric, *(number(p["difference"], p["interval"], "+") for p in pairs)]) + " |")
    source = "Written by `python -m bench.evaluation`: [evaluation.md](../evaluation.md)."
    head = f"# Every number of the worked evaluation\n\n{source}"
    (out / "numbers.md").write_text("\n".join([head, "", *rows, ""]))


if __name__ == "__main__":
    main()
