"""Peak memory and speed of one learner step by mode: plain, FSDP, checkpointing, offloads, two processes.

`python -m bench.learner.modes [--dtype float32] [--mode NAME] [--json FILE]`: a fresh process, or two over gloo, for
each. SmolLM2-135M, LoRA 32 on all layers; one step of two problems with a search and an aggregation prompt and four
traces below each, micro-batches of 2,048 tokens. `peak` is the most resident memory (VmRSS) during the step, `held`
that before it (weights, moments, libraries), `load` what loading took at most, each of one process; CPU seconds.

`--steps 50`: the demo's model instead, resident memory after each tenth of so many steps.
`--rows`: what the head takes beside its inputs, by sampled tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from spiral_fast import ranks
from spiral_fast.config import Config, load_config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import load_model
from spiral_fast.learner.rows import Row
from spiral_fast.trace import AGGREGATION, SEARCH
from spiral_kernels import linear_logprob

MODES: dict[str, list[str]] = {
    "plain": [],
    "FSDP, 1 process": ["learner.fsdp=true"],
    "checkpointing": ["learner.checkpointing=true"],
    "checkpointing, offloaded": ["learner.checkpointing=true", "learner.offload_checkpoints=true"],
    "FSDP, base offloaded": ["learner.fsdp=true", "learner.offload_base=true"],
    "FSDP, 2 processes": ["learner.fsdp=true"],
}
PROBLEMS = 2
PROMPT, SEARCH_TOKENS, AGGREGATION_PROMPT, AGGREGATION_TOKENS = 128, 192, 700, 128


def configured(overrides: list[str], dtype: str) -> Config:
    fixed = [f"model.dtype={dtype}", "learner.micro_batch_tokens=2048", "learner.self_check=false"]
    return load_config("configs/smollm2_cpu.yaml", [*fixed, *overrides])


def rows_of(vocabulary: int) -> list[Row]:
    """Per problem 4 search traces below a prompt, and 4 aggregation traces below another."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(PROBLEMS):
        for level, n_prompt, n in (
            (SEARCH, PROMPT, SEARCH_TOKENS),
            (AGGREGATION, AGGREGATION_PROMPT, AGGREGATION_TOKENS),
        ):
            prompt = rng.integers(2, vocabulary, n_prompt).tolist()
            for _ in range(4):
                tokens = rng.integers(2, vocabulary, n).tolist()
                rows.append(Row(prompt, tokens, np.full(n, -np.log(vocabulary), np.float32), 0.5, 0.01, level))
    return rows


def resident() -> int:
    """Bytes of this process in memory, mapped files included: in bfloat16 transformers leaves the weights in theirs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class Peak:
    """The most `resident` within, looked at every 2 ms by a thread."""

    def __enter__(self) -> Peak:
        self.most, self._done = resident(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done:
            self.most = max(self.most, resident())
            time.sleep(0.002)

    def __exit__(self, *error) -> None:
        self._done = True
        self._thread.join()


def measure(mode: str, dtype: str) -> dict:
    torch.set_num_threads(1)
    ranks.join("cpu")
    config = configured(MODES[mode], dtype)
    torch.manual_seed(0)
    started = resident()
    with Peak() as loading:
        learner_config = config.learner
        loaded = load_model(config.model, "cpu", shard=learner_config.fsdp, offload_base=learner_config.offload_base)
    learner = Learner(config, loaded)
    rows = rows_of(loaded.causal_lm.config.vocab_size)
    learner.step([row for row in rows if len(row.tokens) == SEARCH_TOKENS][:2])  # moments, threads
    held, clock, wall = resident(), time.process_time(), time.perf_counter()
    with Peak() as stepping:
        stats = learner.step(rows)
    seconds, wall = time.process_time() - clock, time.perf_counter() - wall
    if stats.skipped_reason:
        raise RuntimeError(stats.skipped_reason)
    return {
        "mode": mode,
        "dtype": dtype,
        "rank": ranks.rank(),
        "load_peak_mb": (loading.most - started) / 1e6,
        "held_mb": held / 1e6,
        "peak_mb": stepping.most / 1e6,
        "cpu_seconds": seconds,
        "wall_seconds": wall,
        "tokens": stats.tokens_computed,
        "tokens_per_cpu_s": stats.tokens_computed / ranks.size() / seconds,
        "gradient_norm": stats.gradient_norm,
    }


def run_mode(mode: str, dtype: str) -> list[dict]:
    """In processes of their own: one dict per process."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if "2 processes" in mode else []
    command = [sys.executable, *launch, "-m", "bench.learner.modes", "--mode", mode, "--dtype", dtype, "--here"]
    # glibc else keeps what was freed, in amounts that vary from run to run
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"mode"')]
    return sorted(found, key=lambda line: line["rank"])


def by_steps(n: int) -> list[dict]:
    """Resident memory of the demo's learner after each tenth of n steps of the same size."""
    torch.set_num_threads(1)
    config = load_config("configs/demo.yaml", ["learner.self_check=false"])
    loaded = load_model(config.model, "cpu")
    learner, rows, found = Learner(config, loaded), rows_of(loaded.causal_lm.config.vocab_size), []
    rows = [Row(r.prompt[:60], r.tokens[:40], r.rollout_logp[:40], r.credit, 1e-4, r.level) for r in rows]
    for step in range(1, n + 1):
        learner.step(rows)
        if step % max(1, n // 10) == 0:
            found.append({"step": step, "resident_mb": resident() / 1e6})
    return found


def by_rows() -> list[dict]:
    """The head of SmolLM2 alone (V 49152, H 576, float32), forward and backward."""
    torch.set_num_threads(1)
    weight, found = torch.randn(49152, 576), []
    for n in (256, 256, 1024, 4096, 16384):  # the first is the warm-up
        hidden = torch.randn(n, 576, requires_grad=True)
        targets = torch.randint(0, 49152, (n,))
        before, start = resident(), time.process_time()
        with Peak() as peak:
            linear_logprob(hidden, weight, targets).logp.sum().backward()
        beside = peak.most - before - hidden.grad.nbytes
        found.append({"rows": n, "beside_mb": beside / 1e6, "logits_mb": 4 * n * 49152 / 1e6})
        found[-1]["cpu_seconds"] = time.process_time() - start
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--here", action="store_true", help="this mode alone, in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.mode[0], arguments.dtype[0])), flush=True)
        return
    if arguments.steps or arguments.rows:
        found = by_steps(arguments.steps) if arguments.steps else by_rows()
        for line in found:
            print("  ".join(f"{name} {value:,.1f}" for name, value in line.items()), flush=True)
    else:
        found = []
        print(
            f"{'':36}{'load':>8}{'held':>8}{'peak':>8}  MB{'CPU s':>8}{'tokens/CPU s':>14}{'|gradient|':>12}",
            flush=True,
        )
        for dtype in arguments.dtype or ["bfloat16"]:
            for mode in arguments.mode or MODES:
                for line in run_mode(mode, dtype):
                    found.append(line)
                    name = f"{dtype} {mode}" + (f", rank {line['rank']}" if "2 processes" in mode else "")
                    print(
                        f"{name:36}{line['load_peak_mb']:8.0f}{line['held_mb']:8.0f}{line['peak_mb']:8.0f}    "
                        f"{line['cpu_seconds']:8.1f}{line['tokens_per_cpu_s']:14.0f}{line['gradient_norm']:12.5g}",
                        flush=True,
                    )
    if arguments.json:
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        written = {"date": datetime.date.today().isoformat(), "versions": versions, "lines": found}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
