"""`make gpu-check`: everything that needs a GPU, on a bare machine without network, in one JSON within 8 minutes.

`python -m bench.gpu [--out FILE]` from the checkout's folder, with a python that has torch for CUDA and triton. What is
not installed (pytest, hypothesis, the native module) is left out and named. Exits with 1 where a test fails or there is
no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 460  # of all; tests and the learner's steps may take up to so many each, the other benches what is left
TEST_SECONDS, LEARNER_SECONDS = 230, 100
TESTS = ("tests/gpu", "tests/kernels/test_linear_logprob.py", "tests/kernels/test_set_advantages.py")
PACKAGES = (
    *("torch", "triton", "transformers", "peft", "numpy", "numba", "pytest", "hypothesis", "pytest-timeout"),
    *("flash-attn", "liger-kernel", "bitsandbytes"),
)


def no_gpu() -> str | None:
    """Why there is nothing to run; None if there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}


def versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    found = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    if found["torch"]:
        import torch

        found["torch"] = str(torch.__version__)  # with the build, +cu130, which the package's own metadata may lack
    return found


def commit() -> str | None:
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or None


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_for(command: list[str], seconds: float, extra: dict[str, str]) -> str | None:
    """Runs it; what is wrong if it does not end well: the end of its output."""
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment() | extra, timeout=seconds, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    return None if run.returncode == 0 else (run.stdout + run.stderr)[-4000:]


def run_tests(folder: Path, seconds: float) -> dict:
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        return {"left_out": f"not installed: {', '.join(missing)}"}
    file = folder / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "bench.gpu.outcomes", "-p", "no:cacheprovider"]
    # strict options would stop where a plugin that pyproject.toml configures is not installed
    command += ["-o", "addopts=--import-mode=importlib", *TESTS]
    if importlib.util.find_spec("xdist") is not None:  # most of the time goes into compiling kernels on the CPU
        command += ["-n", str(min(6, os.cpu_count() or 1))]
    ended = run_for(command, seconds, {"TEST_OUTCOMES": str(file)})
    found = lines_of(file)
    counts = {outcome: sum(t["outcome"] == outcome for t in found) for outcome in ("passed", "failed", "skipped")}
    return {"counts": counts, "ended": ended or "well", "outcomes": found}


def run_benches(folder: Path, seconds: float) -> dict:
    file = folder / "benches.jsonl"
    ended = run_for([sys.executable, "-m", "bench.gpu.benches", str(file)], seconds, {})
    return {"ended": ended or "well", "figures": lines_of(file)}


def run_learner(folder: Path, seconds: float) -> dict:
    missing = [name for name in ("transformers", "peft", "pydantic", "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        return {"left_out": f"not installed: {', '.join(missing)}", "ended": "well", "figures": []}
    file = folder / "learner.jsonl"
    ended = run_for(
        [sys.executable, "-m", "bench.gpu.learner", str(file), "--seconds", f"{seconds - 10:.0f}"], seconds, {}
    )
    return {"ended": ended or "well", "figures": lines_of(file)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu_check.json")
    out = parser.parse_args().out
    why = no_gpu()
    if why:
        print(f"gpu-check: nothing was run: {why}")
        return 1
    import torch

    begin = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    result = {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "native_module": (why_not_native() or "built"),
    }
    with tempfile.TemporaryDirectory() as folder:
        result["tests"] = run_tests(Path(folder), TEST_SECONDS)
        result["learner"] = run_learner(Path(folder), LEARNER_SECONDS)
        result["benches"] = run_benches(Path(folder), SECONDS - (time.monotonic() - begin))
    result["seconds"] = round(time.monotonic() - begin, 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['device']}: tests {result['tests'].get('counts') or result['tests']['left_out']}")
    figures = result["learner"]["figures"] + result["benches"]["figures"]
    for figure in figures:
        print(json.dumps(figure))
    print(f"{result['seconds']} s, written to {out}")
    broken = [f for f in figures if "error" in f and not f.get("name", "").startswith("peer")]
    well = [result["tests"].get("ended"), result["learner"]["ended"], result["benches"]["ended"]] == ["well"] * 3
    return 0 if well and not broken else 1


def why_not_native() -> str | None:
    run = subprocess.run(
        [sys.executable, "-c", "from spiral_kernels.dispatch import native_unavailable; print(native_unavailable())"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    said = (run.stdout.strip() or run.stderr.strip()[-500:]).splitlines()[-1]
    return None if said == "None" else said


if __name__ == "__main__":
    sys.exit(main())
