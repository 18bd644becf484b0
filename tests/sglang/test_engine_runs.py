"""Whole commands on a real SGLang server: training, resuming, evaluation, cross-pairing, verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import load_config
from spiral_fast.rollout.engine import EngineFailed, RequestsLost, generate
from spiral_fast.rollout.sglang.base_model import base_model
from spiral_fast.rollout.sglang.names import KEY_VARIABLE
from spiral_fast.rollout.sglang.server import ServerProcess
from tests.sglang.switch import Switch
from tests.sglang.test_engine import adapters_on, ask, gaps, make_engine, request
from tests.sglang.tiny_server import load, make_config

SMALL = [
    "batch.live_problems=4",
    "problems.train_size=32",
    "problems.eval_size=4",
    "rollout.max_running=64",
    "evaluate={samples: 4, pass_at: [1, 4], majority_at: [4], rsa: {steps: 1}, bootstrap: 20}",
    "threads=1",
]


@pytest.fixture(scope="module")
def parts_server(server, tmp_path_factory) -> Iterator[ServerProcess]:
    """With the key of the other server."""
    config = load_config("configs/demo.yaml", [*SMALL, "rollout.engine=sglang"])
    log = tmp_path_factory.mktemp("server") / "server.log"
    process = ServerProcess(config, base_model(config.model), log, api_key=server.api_key)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def on_server(parts_server, monkeypatch) -> list[str]:
    """Overrides of configs/demo.yaml."""
    monkeypatch.setenv(KEY_VARIABLE, parts_server.api_key)
    return [*SMALL, "rollout.engine=sglang", f"rollout.servers=[{parts_server.url!r}]"]


@pytest.fixture(scope="module")
def run(parts_server, tmp_path_factory) -> Path:
    """Three steps of training."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    overrides = [*SMALL, "learner.steps=3", f"rollout.servers=[{parts_server.url!r}]", f"run_dir={folder}"]
    os.environ[KEY_VARIABLE] = parts_server.api_key
    try:
        done = CliRunner().invoke(app, ["train", "configs/demo.yaml", *overrides])  # auto: sglang, since it has servers
    finally:
        del os.environ[KEY_VARIABLE]
    assert done.exit_code == 0, done.output
    return folder


def steps_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_training(run, parts_server):
    """The learner's log-probs of what the server sampled are the server's; every metric there is."""
    steps = steps_of(run)
    documented = {line.split("`")[1] for line in Path("docs/metrics.md").read_text().splitlines() if line[:3] == "| `"}
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["logp_gap/max"] <= 1e-3 and step["skipped"] is None and step["policy_version"] == step["step"]
        assert set(step) <= documented and documented - set(step) <= {"time/peak_cuda_mb", "grad/cosine"}
        assert step["tokens/hits"] >= 0.99 * step["tokens/cacheable"] > 0
        assert step["tokens/prompt"] == step["tokens/cached"] + step["tokens/computed"] > step["tokens/cached"] > 0
        assert step["tokens/busiest_server"] == step["tokens/prompt"] + step["tokens/generated"]
        assert step["time/swap"] > 0
    assert (run / "eval_after.json").exists()
    assert not (run / "adapters").exists() and not (run / "sglang_server.log").exists()  # of a server of its own
    assert adapters_on(parts_server) == set()


def test_resuming_says_that_it_repeats_no_bits(run, on_server):
    command = [sys.executable, "-m", "spiral_fast.cli", "train", "--resume", str(run), "learner.steps=4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not bit for bit" in done.stdout
    assert [step["policy_version"] for step in steps_of(run)] == [1, 2, 3, 4]


def test_evaluation_and_cross_pairing(run, on_server, parts_server, tmp_path):
    adapter = run / "checkpoints" / "step_000003"
    out = tmp_path / "eval.json"
    overrides = [*on_server, "evaluate.chunk_problems=2"]  # two chunks: the second begins with an empty cache
    done = CliRunner().invoke(
        app, ["eval", "configs/demo.yaml", "--adapter", str(adapter), "--out", str(out), *overrides]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["problems"] == 4
    cross = ["--search", "base", "--search", f"new={adapter}", "--aggregation", f"new={adapter}"]
    out = tmp_path / "cross.json"
    done = CliRunner().invoke(app, ["cross", "configs/demo.yaml", *cross, "--out", str(out), *on_server])
    assert done.exit_code == 0, done.output
    assert set(json.loads(out.read_text())["matrix"]) == {"base", "new"}
    assert adapters_on(parts_server) == set()


def test_verify(on_server, tmp_path):
    figures = tmp_path / "figures.json"
    done = CliRunner().invoke(app, ["verify", "configs/demo.yaml", *on_server, "--json", str(figures)])
    assert done.exit_code == 0, done.output
    checks = {check["check"]: check for check in json.loads(figures.read_text())["checks"]}
    assert checks["engine = learner"]["status"] == checks["cached = cold"]["status"] == "pass"
    assert checks["engine = learner"]["values"]["max"] < 1e-4
    assert "from the cache" in checks["cached = cold"]["note"]
    assert "own memory is not looked at" in checks["memory, largest step"]["note"]


def test_dry_run_asks_no_server(on_server, tmp_path):
    overrides = [*SMALL, "rollout.servers=['http://127.0.0.1:1']", f"run_dir={tmp_path / 'none'}"]
    done = CliRunner().invoke(app, ["train", "configs/demo.yaml", "--dry-run", *overrides])
    assert done.exit_code == 0, done.output
    assert "rollout engine sglang, servers http://127.0.0.1:1" in done.output
    assert not (tmp_path / "none").exists()


def test_a_server_that_comes_back_with_another_model(server, parts_server, model_folder):
    """Behind the same URL and key. It is asked anew what it is, before it gets an adapter."""
    loaded = load(make_config(model_folder))
    switch = Switch(server.url)
    switch.api_key = server.api_key
    before, there = adapters_on(parts_server), adapters_on(server)
    engine = make_engine(loaded, [switch])
    try:
        asked = [request([5, 6, 7], index=i, max_new_tokens=200) for i in range(16)]
        assert max(gaps(loaded, asked, generate(engine, asked))) <= 1e-4
        for one in asked:
            engine.add(one)
        switch.turn(parts_server.url)
        with pytest.raises(RequestsLost):
            while engine.step():
                pass
        for one in asked:
            engine.add(one)
        with pytest.raises(EngineFailed, match="whose vocabulary has .* tokens; the learner's has 50"):
            engine.step()
    finally:
        engine.close()
        switch.close()
        for name in adapters_on(server) - there:  # whoever comes back has none of them
            ask(server, "/unload_lora_adapter", {"lora_name": name})
    assert adapters_on(parts_server) == before
