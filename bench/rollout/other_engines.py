"""Starts another engine's bench in that engine's own environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENGINES = {  # module, and what its environment needs
    "sglang": ("bench.rollout.sglang_peer", {"SGLANG_USE_CPU_ENGINE": "1"}),
    "vllm": (
        "bench.rollout.vllm_peer",
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"},
    ),
}


@dataclass(frozen=True)
class Job:
    """What peer.py reads."""

    folder: str  # of the base model
    dtype: str
    adapter: str | None  # folder of a PEFT adapter
    rank: int  # of the adapter
    prompts: list[list[int]]
    lengths: list[list[int]]  # of each prompt's traces
    cache_tokens: int
    max_running: int
    rounds: int


def run_engine(engine: str, python: str, job: Job) -> list[dict] | str:
    """What peer.py printed; or, where the engine stopped, the first error it named."""
    module, settings = ENGINES[engine]
    paths = [REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "tests" / "support"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    environment |= settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [python, "-m", module],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        env=environment,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    named = re.search(r"\w+Error: .+", done.stderr)
    return named[0][:300] if named else done.stderr[-300:]
