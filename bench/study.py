"""The six algorithms on the demo task, three seeds each. `make study`.

SPIRAL and GRPO are trained with every learning rate of one common grid, the others with COMMON, the rate that was best
for both. An algorithm's best rate is the one with the best mean RSA step 3. Runs already complete below --runs are
kept: after a change of code or configs give another folder. Writes study.md, study.png and study.json into the folder
--out (docs).
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

SEEDS = (0, 1, 2)
GRID, COMMON = (2e-4, 6e-4, 1.8e-3), (6e-4,)
LEARNING_RATES = {
    "spiral": GRID,
    "grpo": GRID,
    "aggregator_only": COMMON,
    "independent": COMMON,
    "search_only": COMMON,
    "poly_epo": COMMON,
}
CASES = [(algorithm, rate) for algorithm, rates in LEARNING_RATES.items() for rate in rates]

TEXT = """# Six algorithms on the demo task

`make study` trains `configs/demo.yaml` (spiral) and `configs/demo_<algorithm>.yaml` from the same warm-started model
with the seeds {seeds}, and wrote this page. What the algorithms are: [algorithms.md](algorithms.md). All sample 24
traces of 16 problems in each of 160 steps: the same budget of sampled tokens. spiral and grpo have the learning rates
{grid}; the other four have {common} alone{best_of_both}. *best*: the rate with the best mean RSA
step 3 of its algorithm, chosen on the figures shown here.

192 evaluation problems, 64 search traces each; RSA is recursive self-aggregation with a population of 8 and sets of 4
(step 0 = the search traces). Mean ± standard deviation over the seeds. A seed changes the training and the evaluation
problems too, and the warm start is measured on the same ones. The embedded engine sampled; one training by SGLang:
[sglang.md](sglang.md).

{table}

![pass@k and recursive self-aggregation](study.png)

Thin lines are seeds, thick lines their means, each algorithm at its best learning rate. Figures of every run:
[study.json](study.json). Measured with {versions}.
"""

FIGURES: dict[str, Callable[[dict], float]] = {
    "pass@1": lambda e: e["pass_at_k"]["1"],
    "pass@8": lambda e: e["pass_at_k"]["8"],
    "pass@64": lambda e: e["pass_at_k"]["64"],
    "majority@16": lambda e: e["majority_at_k"]["16"],
    "RSA step 1": lambda e: e["rsa"][1],
    "RSA step 3": lambda e: e["rsa"][3],
    "RSA step 5": lambda e: e["rsa"][5],
    "search entropy, nats": lambda e: e["search_entropy"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the table and the plot")
    arguments = parser.parse_args()
    runs = [(*case, seed) for seed in SEEDS for case in CASES]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = dict(zip(runs, pool.map(lambda case: run(*case, arguments.runs), runs), strict=True))
    write(results, arguments.out)


def run(algorithm: str, learning_rate: float, seed: int, runs: Path) -> dict:
    """Train one case, unless it is complete; its evaluations, the wall seconds of the training and its tokens."""
    folder = runs / f"{algorithm}_lr{learning_rate:g}_seed{seed}"
    if not (folder / "eval_after.json").exists():
        if folder.exists():
            folder.rename(folder.with_name(f"{folder.name}.incomplete_{int(time.time())}"))
        config = "configs/demo.yaml" if algorithm == "spiral" else f"configs/demo_{algorithm}.yaml"
        overrides = [f"learner.learning_rate={learning_rate}", f"seed={seed}", f"run_dir={folder}", "threads=1"]
        command = [sys.executable, "-m", "spiral_fast.cli", "train", config, *overrides]
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


def write(results: dict, out: Path) -> None:
    """The page, the plot and the figures behind them."""

    def over_seeds(case: tuple[str, float], figure: Callable, which: str = "after") -> list[float]:
        return [figure(results[*case, seed][which]) for seed in SEEDS]

    def quality(case: tuple[str, float]) -> float:
        return mean(over_seeds(case, FIGURES["RSA step 3"]))

    best = [max((case for case in CASES if case[0] == algorithm), key=quality) for algorithm in LEARNING_RATES]
    warm = [f"{mean(over_seeds(best[0], figure, 'before')):.3f}" for figure in FIGURES.values()]
    rows = [
        ["", "learning rate", *FIGURES, "sampled tokens"],
        ["---"] * (3 + len(FIGURES)),
        ["warm start", "", *warm, ""],
    ]
    for algorithm, rate in CASES:
        chosen = " (best)" if (algorithm, rate) in best and len(LEARNING_RATES[algorithm]) > 1 else ""
        cells = [_mean_sd(over_seeds((algorithm, rate), figure)) for figure in FIGURES.values()]
        tokens = mean(results[algorithm, rate, seed]["sampled_tokens"] for seed in SEEDS)
        rows.append([algorithm, f"{rate:g}{chosen}", *cells, f"{tokens:,.0f}"])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    page = TEXT.format(
        seeds=", ".join(map(str, SEEDS)),
        grid=", ".join(f"{rate:g}" for rate in GRID),
        common=f"{COMMON[0]:g}",
        best_of_both=", the best rate of both" if {rate for _, rate in best} == {*COMMON} else "",
        table=table,
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")),
    )
    (out / "study.md").write_text(page)
    figures = {f"{algorithm} lr={rate:g} seed={seed}": found for (algorithm, rate, seed), found in results.items()}
    (out / "study.json").write_text(json.dumps(figures, indent=1))
    plot(results, best, out / "study.png")
    print(table)


def plot(results: dict, best: list[tuple[str, float]], path: Path) -> None:
    """pass@k and RSA per step: warm start, and each algorithm at its best learning rate with every seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    lines = [
        ("warm start", "before", best[0], "0.5"),
        *((case[0], "after", case, f"C{i}") for i, case in enumerate(best)),
    ]
    for label, which, case, colour in lines:
        evaluations = [results[*case, seed][which] for seed in SEEDS]
        ks = sorted(map(int, evaluations[0]["pass_at_k"]))
        for axis, x, curves in (
            (left, ks, [[e["pass_at_k"][str(k)] for k in ks] for e in evaluations]),
            (right, range(len(evaluations[0]["rsa"])), [e["rsa"] for e in evaluations]),
        ):
            for curve in curves:
                axis.plot(x, curve, color=colour, alpha=0.2, linewidth=1)
            axis.plot(x, [mean(values) for values in zip(*curves, strict=True)], "o-", color=colour, label=label)
    left.set(xscale="log", xlabel="k", ylabel="pass@k", title="independent search traces")
    left.set_xticks(ks, map(str, ks))
    right.set(xlabel="RSA step", ylabel="pass@1", title="recursive self-aggregation")
    for axis in (left, right):
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _mean_sd(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


if __name__ == "__main__":
    main()
