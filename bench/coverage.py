"""How often the evaluation's 95 % bootstrap intervals hold the true mean: `python -m bench.coverage`.

Problems have Beta-distributed success probabilities, an outcome each is the share of 1, 8 or 64 correct traces.
"""

from __future__ import annotations

import argparse

import numpy as np

from spiral_fast.evaluate.bootstrap import bootstrap_interval

PROBLEMS = (192, 48, 12)
TRACES = (1, 8, 64)
BETAS = ((0.5, 0.5), (1.0, 3.0), (4.0, 2.0))  # mean .5, .25, .67
SIMULATIONS = 600


def coverage(problems: int, traces: int, beta: tuple[float, float]) -> float:
    """Share of the simulated evaluations whose interval holds the mean of the distribution."""
    rng = np.random.default_rng([problems, traces, *(int(10 * x) for x in beta)])
    truth, hits = beta[0] / sum(beta), 0
    for seed in range(SIMULATIONS):
        outcomes = rng.binomial(traces, rng.beta(*beta, problems)) / traces
        low, high = bootstrap_interval(outcomes, 1000, seed)
        hits += low <= truth <= high
    return hits / SIMULATIONS


def main() -> None:
    for problems in PROBLEMS:
        found = [coverage(problems, traces, beta) for traces in TRACES for beta in BETAS]
        print(f"{problems} problems: {min(found):.3f} .. {max(found):.3f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
