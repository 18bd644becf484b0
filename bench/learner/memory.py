"""Peak memory of a learner step at equal computed tokens, rows alone and with shared prefixes.

`python -m bench.learner.memory [--case NAME]`: one process each; random tokens in SPIRAL's shape (4 samples below each
prompt) that fill `micro_batch_tokens` once. Peak resident memory of the step above what the process holds before it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
import torch

from bench.learner.run import CASES, load
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.rows import Row
from spiral_fast.verify.memory import peak_bytes, start_peak

SAMPLES, SAMPLED = 4, 40


def rows_of(sharing: str, budget: int, vocabulary: int) -> list[Row]:
    """Rows that compute `budget` tokens, to within one row: below shared prompts, or with a prompt each."""
    rng = np.random.default_rng(0)
    n_prompt = 200 if sharing != "none" else 200 - SAMPLED
    own = SAMPLED - 1
    per_group = n_prompt + SAMPLES * own if sharing != "none" else SAMPLES * (n_prompt + own)
    rows = []
    for _ in range(budget // per_group):
        prompt = rng.integers(2, vocabulary, n_prompt).tolist()
        for _ in range(SAMPLES):
            tokens = rng.integers(2, vocabulary, SAMPLED).tolist()
            if sharing == "none":
                prompt = rng.integers(2, vocabulary, n_prompt).tolist()
            logp = np.full(SAMPLED, -np.log(vocabulary), np.float32)
            rows.append(Row(prompt, tokens, logp, 0.5, 0.01, 1))
    return rows


def measure(case: str, sharing: str) -> str:
    torch.set_num_threads(1)
    config, parts = load(CASES[case])
    budget = CASES[case].micro_batch_tokens
    changes = {"sharing": sharing, "micro_batch_tokens": budget}
    learner = Learner(config.model_copy(update={"learner": config.learner.model_copy(update=changes)}), parts.loaded)
    rows = rows_of(sharing, budget, parts.loaded.causal_lm.config.vocab_size)
    learner.step(rows[:1])  # moments, threads
    held = start_peak(torch.device("cpu"))
    stats = learner.step(rows)
    peak = peak_bytes(torch.device("cpu")) - held
    per_token = peak / stats.tokens_computed
    return (
        f"{case:20}{sharing:6}{stats.tokens_computed:8}{stats.tokens_trained:9}{peak / 1e6:9.0f}{per_token / 1e3:11.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--sharing", help="this line alone, in this process")
    arguments = parser.parse_args()
    cases = arguments.case or list(CASES)
    if arguments.sharing:
        print(measure(cases[0], arguments.sharing))
        return
    print(f"{'':26}{'tokens':>8}{'sampled':>9}{'peak MB':>9}{'kB/token':>11}", flush=True)
    for case in cases:
        for sharing in ("none", "set", "tree"):
            command = [sys.executable, "-m", "bench.learner.memory", "--case", case, "--sharing", sharing]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
