"""Two and four processes against one: the same cases (rank_cases.py), one start of each number for all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from spiral_fast.learner.micro_batches import deal
from tests.learner.rank_cases import STEPS

# One process imports everything, the ranks are forks of it: an import of transformers costs more than all cases.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.learner.rank_cases"])
DEADLINE_S = 200.0


def _run(rank: int, size: int, port: int, folder: Path, results) -> None:
    """What torchrun sets, then all cases. One process is a rank of its own."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from spiral_fast import ranks
    from tests.learner import rank_cases

    torch.set_num_threads(1)
    try:
        ranks.join("cpu")
        results.put((rank, rank_cases.everything(folder)))
        ranks.gather(None)
    except BaseException:
        import traceback

        results.put((rank, traceback.format_exc()))
        raise


def run(size: int, folder: Path) -> list[dict]:
    """What every rank found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=_run, args=(r, size, port, folder, results)) for r in range(size)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=DEADLINE_S) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    for value in found.values():
        assert not isinstance(value, str), value
    return [found[rank] for rank in range(size)]


@pytest.fixture(scope="module")
def one_two_four(tmp_path_factory):
    """4 ranks resume what 2 left, 1 what both left."""
    folder = tmp_path_factory.mktemp("ranks")
    return {size: run(size, folder) for size in (2, 4, 1)}


def near(a, b, tolerance: float) -> None:
    assert type(a) is type(b) or {type(a), type(b)} <= {int, float}, (a, b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            near(a[name], b[name], tolerance)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            near(x, y, tolerance)
    elif isinstance(a, np.ndarray):
        if tolerance > 1e-3:  # 16 bits: Adam turns a tiny gradient of another sign into another whole step
            assert np.abs(a - b).mean() < tolerance / 10
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance, nan_ok=True)
    else:
        assert a == b


def same_bits(a, b) -> None:
    near(a, b, 0.0)


CUT = ("micro_batches", "tokens_computed", "flops_computed")  # more parts share less


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [*STEPS, "bfloat16"])
def test_the_same_update_whatever_the_number_of_ranks(one_two_four, name, size):
    one = one_two_four[1][0][name]
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    for rank in one_two_four[size]:
        same_bits(rank[name], one_two_four[size][0][name])
        near(rank[name]["adapter"], one["adapter"], tolerance)
        for a, b in zip(rank[name]["stats"], one["stats"], strict=True):
            near({k: v for k, v in a.items() if k not in CUT}, {k: v for k, v in b.items() if k not in CUT}, tolerance)
            assert a["skipped_reason"] is None and a["gradient_norm"] > 0
            assert a["micro_batches"] >= min(size, a["live_rows"])


@pytest.mark.parametrize("size", [2, 4])
def test_everything_else_a_learner_does(one_two_four, size):
    one = one_two_four[1][0]["others"]
    for rank in one_two_four[size]:
        same_bits(rank["others"], one_two_four[size][0]["others"])
        near(rank["others"] | {"not finite": None}, one | {"not finite": None}, 1e-5)
    for of in (1, size):
        found = one_two_four[of][0]["others"]
        assert found["blamed"] == [3] and found["not finite"]["skipped_reason"]
        assert all(
            found[name] for name in ("one unshard a rollout", "engine agrees", "search left alone", "self-check")
        )
    same_bits(one["skipped"], one["after supervised"])
    near(one["as rank 0 reads it"], one["log-probs again"], 1e-5)
    assert np.abs(one["its base"] - one["log-probs again"]).max() > 1e-2
    assert found["supervised"][1] < found["supervised"][0]


@pytest.mark.parametrize("fsdp", [True, False])
def test_a_checkpoint_is_resumed_with_another_number_of_ranks(one_two_four, fsdp):
    name = f"resumed, fsdp {fsdp}"
    found = {size: one_two_four[size][0][name] for size in (1, 2, 4)}
    assert f"of_2_{fsdp}" in found[4] and {f"of_2_{fsdp}", f"of_4_{fsdp}"} < found[1].keys()
    for size, of in found.items():
        assert of["same bits with as many ranks"]
        for file in [key for key in of if key.startswith("of_")]:
            near(of[file], found[1]["adapter"], 1e-5)
        for rank in one_two_four[size]:
            same_bits(rank[name], of)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_where_ranks_meet(one_two_four, size):
    for rank in one_two_four[size]:
        found = rank["meeting"]
        assert found["shared out"] == [(x, x * x) for x in range(7)]
        assert found["to the first"] == [0, 0, 0] and found["nothing"] == []
        assert found["from the first"] == ("rank", 0)
        assert found["evenly"] and found["unknown error"]
        assert found["error"][1] == ["p7"] and "policy version 3" in found["error"][0]


def test_the_longest_micro_batches_run_together_and_the_sums_are_even():
    flops = [1.0, 8.0, 2.0, 7.0, 3.0]
    load = [0.0, 0.0]
    assert deal(flops, load) == [[1, 3], [2, 4], [0, None]]
    assert load == [11.0, 10.0]
    assert deal([5.0], load) == [[None, 0]] and load == [11.0, 15.0]
    assert deal(flops, [0.0]) == [[0], [1], [2], [3], [4]]
