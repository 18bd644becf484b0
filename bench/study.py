"""SPIRAL beside GRPO on the demo task: every learning rate of one common grid, three seeds each. `make study`.

Each algorithm's learning rate is the one with the best mean RSA step 3. Runs already complete below
--runs are kept: after a change of code or configs give another folder.
Writes study.md, study.png and study.json into the folder --out (docs).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

LEARNING_RATES = (2e-4, 6e-4, 1.8e-3)
SEEDS = (0, 1, 2)
ALGORITHMS = {"spiral": "configs/demo.yaml", "grpo": "configs/demo_grpo.yaml"}

TEXT = """# SPIRAL beside GRPO on the demo task

`make study` trains `configs/demo.yaml` and `configs/demo_grpo.yaml` from the same warm-started model with the learning
rates {rates} and the seeds {seeds}, and wrote this page. Both sample 24 traces of 16 problems in each of 160 steps: the
same budget of sampled tokens. 192 evaluation problems, 64 search traces each; RSA is recursive self-aggregation with a
population of 8 and sets of 4 (step 0 = the search traces). Mean ± standard deviation over the seeds. A seed changes
the training and the evaluation problems too, and the warm start is measured on the same ones. *best*: the learning
rate with the best mean RSA step 3 of its algorithm, chosen on the figures shown here.

{table}

![pass@k and recursive self-aggregation](study.png)

Thin lines are seeds, thick lines their means, each algorithm at its best learning rate. Figures of every run:
[study.json](study.json).

Measured with {versions}, {jobs} trainings at a time with one thread each on a machine shared with other work: the
seconds of a training are wall time and no claim.
"""

FIGURES: dict[str, Callable[[dict], float]] = {
    "pass@1": lambda e: e["pass_at_k"]["1"],
    "pass@8": lambda e: e["pass_at_k"]["8"],
    "pass@64": lambda e: e["pass_at_k"]["64"],
    "majority@16": lambda e: e["majority_at_k"]["16"],
    "RSA step 1": lambda e: e["rsa"][1],
    "RSA step 3": lambda e: e["rsa"][3],
    "RSA step 5": lambda e: e["rsa"][5],
    "search entropy (nats)": lambda e: e["search_entropy"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the table and the plot")
    arguments = parser.parse_args()
    cases = [(a, lr, s) for s in SEEDS for lr in LEARNING_RATES for a in ALGORITHMS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = dict(zip(cases, pool.map(lambda case: run(*case, arguments.runs), cases), strict=True))
    write(results, arguments.out, arguments.jobs)


def run(algorithm: str, learning_rate: float, seed: int, runs: Path) -> dict:
    """Train one case, unless it is complete; its evaluations and the wall seconds of the training."""
    folder = runs / f"{algorithm}_lr{learning_rate:g}_seed{seed}"
    if not (folder / "eval_after.json").exists():
        if folder.exists():
            folder.rename(folder.with_name(f"{folder.name}.incomplete_{int(time.time())}"))
        overrides = [f"learner.learning_rate={learning_rate}", f"seed={seed}", f"run_dir={folder}", "threads=1"]
        command = [sys.executable, "-m", "spiral_fast.cli", "train", ALGORITHMS[algorithm], *overrides]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        print(f"done {folder}", flush=True)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "before": evaluation(folder / "eval_before.json"),
        "after": evaluation(folder / "eval_after.json"),
        "seconds": sum(step["time/step"] for step in steps),
        "sampled_tokens": sum(step["tokens/generated"] for step in steps),
    }


def evaluation(file: Path) -> dict:
    """An evaluation without its rows per problem."""
    found = json.loads(file.read_text())
    return {key: found[key] for key in ("problems", "samples", "pass_at_k", "majority_at_k", "rsa", "search_entropy")}


def write(results: dict, out: Path, jobs: int) -> None:
    """The page, the plot and the figures behind them."""

    def figures(algorithm: str, learning_rate: float, figure: Callable, which: str = "after") -> list[float]:
        return [figure(results[algorithm, learning_rate, seed][which]) for seed in SEEDS]

    best = {a: max(LEARNING_RATES, key=lambda lr: mean(figures(a, lr, FIGURES["RSA step 3"]))) for a in ALGORITHMS}
    cases = [(a, lr) for a in ALGORITHMS for lr in LEARNING_RATES]
    head = ["", "warm start", *(f"{a} {lr:g}" + (" (best)" if best[a] == lr else "") for a, lr in cases)]
    rows = []
    for name, figure in FIGURES.items():
        warm = figures("spiral", best["spiral"], figure, "before")
        cells = [f"{mean(warm):.3f}", *(_mean_sd(figures(a, lr, figure)) for a, lr in cases)]
        rows.append([name, *cells])
    for name, key, unit in (("training", "seconds", "s"), ("sampled tokens", "sampled_tokens", "")):
        per_case = [mean(results[a, lr, s][key] for s in SEEDS) for a, lr in cases]
        rows.append([name, "", *(f"{value:,.0f} {unit}".strip() for value in per_case)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    rates = ", ".join(f"{lr:g}" for lr in LEARNING_RATES)
    page = TEXT.format(rates=rates, seeds=", ".join(map(str, SEEDS)), table=table, versions=versions, jobs=jobs)
    (out / "study.md").write_text(page)
    (out / "study.json").write_text(
        json.dumps({f"{a} lr={lr:g} seed={s}": result for (a, lr, s), result in results.items()}, indent=1)
    )
    plot(results, best, out / "study.png")
    print(table)


def plot(results: dict, best: dict[str, float], path: Path) -> None:
    """pass@k and RSA per step: warm start, and each algorithm at its best learning rate with every seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    lines = [
        ("warm start", "before", "spiral", "0.5"),
        ("SPIRAL", "after", "spiral", "C0"),
        ("GRPO", "after", "grpo", "C3"),
    ]
    for label, which, algorithm, colour in lines:
        evaluations = [results[algorithm, best[algorithm], seed][which] for seed in SEEDS]
        ks = sorted(map(int, evaluations[0]["pass_at_k"]))
        for axis, x, curves in (
            (left, ks, [[e["pass_at_k"][str(k)] for k in ks] for e in evaluations]),
            (right, range(len(evaluations[0]["rsa"])), [e["rsa"] for e in evaluations]),
        ):
            for curve in curves:
                axis.plot(x, curve, color=colour, alpha=0.25, linewidth=1)
            axis.plot(x, [mean(values) for values in zip(*curves, strict=True)], "o-", color=colour, label=label)
    left.set(xscale="log", xlabel="k", ylabel="pass@k", title="independent search traces")
    left.set_xticks(ks, map(str, ks))
    right.set(xlabel="RSA step", ylabel="pass@1", title="recursive self-aggregation")
    for axis in (left, right):
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _mean_sd(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


if __name__ == "__main__":
    main()
