"""A small run made through the recorder, with hostile text in its traces."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console as RichConsole

from spiral_fast.config import Config
from spiral_fast.record.console import Console
from spiral_fast.record.recorder import Recorder
from spiral_fast.trace import AGGREGATION, SEARCH, Problem, ProblemRollout, Trace, TraceKey

HOSTILE = "</pre><script>alert(1)</script> & <img src=x onerror=alert(1)>"


def config_of(run_dir: Path, **sections) -> Config:
    return Config.model_validate(
        {
            "run_dir": str(run_dir),
            "model": {"path": "builtin:parts"},
            "problems": {"source": "parts"},
            "learner": {"steps": 3},
        }
        | sections
    )


def trace(level: int, set: int, index: int, **values) -> Trace:
    n = 3 + index
    key = TraceKey("p<0>", level, set, index)
    prompt = [5, 6, 7] if level == SEARCH else [5, 6, 7, set]
    made = Trace(
        key, prompt, list(range(n)), np.full(n, -0.5, np.float32), "stop", 2, text=f"{level}/{index} {HOSTILE}"
    )
    for name, value in values.items():
        setattr(made, name, value)
    return made


def rollout(draw: int = 0, credit: float = 0.25) -> ProblemRollout:
    search = [
        trace(SEARCH, -1, i, credit=credit * (i - 1), reward=1.0, verdict="correct", answer="4") for i in range(3)
    ]
    search[2].gated, search[2].credit = True, 0.0
    sets = np.array([[0, 2], [2, 1]])
    aggregation = [
        [trace(AGGREGATION, k, j, credit=credit * (2 * j - 1), reward=float(j), verdict="wrong") for j in range(2)]
        for k in range(2)
    ]
    return ProblemRollout(Problem("p<0>", f"question {HOSTILE}", "4<2"), draw, search, sets, aggregation)


def evaluation(pass_1: float) -> dict:
    interval = [pass_1 - 0.05, pass_1 + 0.05]
    return {
        "step": 0,
        "problems": 4,
        "samples": 8,
        "pass_at_k": {"1": pass_1, "4": pass_1 + 0.2},
        "majority_at_k": {"4": pass_1 + 0.1},
        "rsa": [pass_1, pass_1 + 0.3],
        "distinct_answers": 2.5,
        "search_entropy": 0.25,
        "stages": [{"mean_length": 19.0}],
        "intervals": {
            "pass_at_k": {"1": interval, "4": interval},
            "majority_at_k": {"4": interval},
            "rsa": [interval, interval],
            "level": 0.95,
        },
    }


def metrics(step: int) -> dict:
    return {
        "reward/search": np.float32(0.1 * step),
        "reward/aggregation": 0.2 * step,
        "problems/live": 3,
        "problems/dead": 1,
        "grad/norm": 0.5,
        "grad/norm_search": float("nan"),
        "logp_gap/mean": 1e-6,
        "tokens/prompt": 1000,
        "tokens/computed": 250,
        "tokens/generated": 500,
        "time/rollout": 2.0,
        "time/step": 3.0,
        "skipped": None,
    }


def quiet() -> tuple[Console, io.StringIO]:
    """A console that is no terminal, and what it wrote."""
    text = io.StringIO()
    return Console(RichConsole(file=text, width=200, highlight=False)), text


def make_run(run_dir: Path, steps: int = 3, finished: bool = True) -> Path:
    with Recorder(run_dir, config_of(run_dir), quiet()[0]) as record:
        record.evaluation("before", evaluation(0.2))
        for step in range(1, steps + 1):
            record.metrics(step, metrics(step))
            record.traces(step, [rollout(draw=step, credit=0.0), rollout(draw=step + 10)])
        if finished:
            record.evaluation("after", evaluation(0.3))
    return run_dir
