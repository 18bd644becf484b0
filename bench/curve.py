"""A run's curve as one picture: reward and entropy by level, and the evaluation before and after.

`python -m bench.curve RUN OUT.png`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from spiral_fast.record.charts import running_mean
from spiral_fast.record.run_folder import read_run

matplotlib.use("Agg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    run = read_run(arguments.run)
    if run.incomplete:
        parser.error(f"{arguments.run} is incomplete: {run.incomplete}")
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    reward, entropy, evaluation = figure.subplots(1, 3)
    steps = [row["step"] for row in run.metrics]
    for axes, title, prefix in ((reward, "reward", "reward/"), (entropy, "entropy, nats per token", "entropy/")):
        for level in ("search", "aggregation"):
            values = run.series(prefix + level)
            (line,) = axes.plot(steps, values, alpha=0.3, linewidth=1)
            axes.plot(steps, running_mean(values), color=line.get_color(), label=level)
        axes.set(title=title, xlabel="step (bold: mean of the last 10)")
    for shift, label in ((-0.2, "before"), (0.2, "after")):
        found = run.evaluations[label]
        names = [*(f"pass@{k}" for k in found["pass_at_k"]), *(f"RSA {i}" for i in range(len(found["rsa"])))]
        places = [i + shift for i in range(len(names))]
        evaluation.bar(places, [*found["pass_at_k"].values(), *found["rsa"]], 0.4, label=label)
    evaluation.set(title="evaluation", ylim=(0, 1))
    evaluation.set_xticks(range(len(names)), names, rotation=45)
    for axes in (reward, entropy, evaluation):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
