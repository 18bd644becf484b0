"""`torchrun -m spiral_fast train` with two ranks against one process: the same run up to rounding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from spiral_fast.train import train
from tests.test_train import SMALL, metrics, small

CHANGES = ["learner.fsdp=true", "reward.workers=1", "record={save_every: 1, checkpoint_every: 1}"]
RANKED = {  # of one step: what depends on which prefixes meet in one cache or one micro-batch
    *("tokens/cached", "tokens/computed", "tokens/learner_computed", "flops/learner_computed", "learner/micro_batches"),
    *("logp_gap/mean", "logp_gap/max", "logp_gap/kl", "logp_gap/ratio_max"),  # themselves rounding
}


def torchrun(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "spiral_fast", "train", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers(launcher: subprocess.Popen) -> list[int]:
    """Process ids of its ranks, in their order."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return sorted(int(child) for child in children)


def wait_for_steps(run: Path, n: int) -> None:
    end = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < n:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return train(small(tmp_path_factory.mktemp("one") / "run", *CHANGES[1:]))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, str]:
    """Stopped by SIGTERM to torchrun in its second step or after it, resumed with two ranks."""
    run = tmp_path_factory.mktemp("two") / "run"
    launcher = torchrun("configs/demo.yaml", *SMALL, *CHANGES, f"run_dir={run}")
    wait_for_steps(run, 1)
    ranks = workers(launcher)
    launcher.send_signal(signal.SIGTERM)
    _, stopped = launcher.communicate(timeout=60)
    assert launcher.returncode != 0 and len(ranks) == 2
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    launcher = torchrun("--resume", str(run))
    printed, error = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, error[-3000:]
    return run, stopped + printed


def test_the_run_of_one_process(one, two):
    run, said = two
    assert said.count("rank 0: error: terminated") == 1 and "rank 1: error" not in said
    assert said.count("resumed from") == said.count("\nreport ") == said.count("evaluation after") == 1
    assert {path.name for path in run.iterdir()} == {path.name for path in one.iterdir()}
    for a, b in zip(metrics(run), metrics(one), strict=True):
        assert a.keys() - b.keys() <= {"grad/cosine"}
        for name in b.keys() - RANKED:
            if not name.startswith("time/"):
                assert a[name] == (
                    b[name] if isinstance(b[name], str | list | None) else pytest.approx(b[name], 1e-4)
                ), name
        assert a["tokens/prompt"] == b["tokens/prompt"] == a["tokens/cached"] + a["tokens/computed"]
    for label in ("before", "after"):
        a, b = (json.loads((of / f"eval_{label}.json").read_text()) for of in (run, one))
        assert [row["correct"] for row in a["per_problem"]] == [row["correct"] for row in b["per_problem"]]
        assert a["pass_at_k"] == b["pass_at_k"] and a["rsa"] == pytest.approx(b["rsa"])


def test_its_adapter_and_a_checkpoint_that_one_process_takes_up(one, two, tmp_path):
    """Step 1 by two ranks, step 2 by one."""
    import shutil

    run = tmp_path / "run"
    shutil.copytree(two[0], run)
    shutil.rmtree(run / "checkpoints" / "step_000002")
    (run / "eval_after.json").unlink()
    train(small(run, *CHANGES[1:]), resume=True)
    adapters = [
        load_file(of / "checkpoints" / "step_000002" / "adapter_model.safetensors") for of in (one, two[0], run)
    ]
    for name, values in adapters[0].items():
        for other in adapters[1:]:
            assert abs(other[name] - values).max() < 1e-5, name


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_goes_on_bit_for_bit(two, tmp_path):
    run = tmp_path / "run"
    launcher = torchrun("configs/demo.yaml", *SMALL, *CHANGES, f"run_dir={run}")
    wait_for_steps(run, 1)
    ranks = workers(launcher)
    os.kill(ranks[1], signal.SIGKILL)
    launcher.communicate(timeout=60)
    assert launcher.returncode != 0 and not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    launcher = torchrun("--resume", str(run))
    _, error = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, error[-3000:]
    same = [load_file(of / "checkpoints" / "step_000002" / "adapter_model.safetensors") for of in (two[0], run)]
    assert same[0].keys() == same[1].keys()
    assert all((same[0][name] == same[1][name]).all() for name in same[0])


def test_others_than_train_are_refused(tmp_path, monkeypatch):
    from spiral_fast.config import ConfigError
    from spiral_fast.set_up import set_up

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="only `train`"):
        set_up(small(tmp_path / "run"))


def test_the_end_of_a_connection_is_told_from_other_errors():
    from torch.distributed import DistBackendError

    from spiral_fast.ranks import RankLost, others_alive

    gloo = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"
    )
    for lost in (RuntimeError(f"{gloo}. Check the logs"), DistBackendError("NCCL error: remote process exited")):
        with pytest.raises(RankLost, match="another rank ended .*(peer|exited)"), others_alive():
            raise lost
    with pytest.raises(RuntimeError, match="^out of memory$"), others_alive():
        raise RuntimeError("out of memory")
