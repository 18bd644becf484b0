"""`spiral-fast eval` on the shipped model: stored in chunks, resumed, sharded, and always the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import ConfigError, load_config
from spiral_fast.evaluate.store import SCHEMA, Store, adapter_digest, chunks, identity, read_chunk
from spiral_fast.evaluate_command import WHOLE, Shard, evaluate_adapter, parse_shard
from spiral_fast.problems import load_problems

SMALL = [
    "threads=1",
    "problems.eval_size=10",
    "problems.train_size=8",
    "evaluate.samples=6",
    "evaluate.pass_at=[1, 6]",
    "evaluate.majority_at=[3]",
    "evaluate.lengths=[18, 19]",
    "evaluate.rsa=[{population: 4, set_size: 2, steps: 2}, {population: 8, set_size: 3, steps: 1}]",
    "evaluate.bootstrap=50",
    "evaluate.chunk_problems=3",
]


def config(*more: str):
    return load_config("configs/demo.yaml", [*SMALL, *more])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict, Path]:
    """An evaluation that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "eval.json"
    return evaluate_adapter(config(), None, out), out


@pytest.fixture
def stops_after(monkeypatch):
    """Ctrl-C instead of the n-th chunk's file."""

    def arrange(n: int) -> None:
        written, write = [], Store.write

        def interrupted(self, name, samples):
            written.append(name)
            if len(written) >= n:
                raise KeyboardInterrupt
            write(self, name, samples)

        monkeypatch.setattr(Store, "write", interrupted)

    return arrange


def test_every_trace_is_stored(whole):
    result, out = whole
    assert json.loads(out.read_text()) == result
    files = sorted((out.parent / "eval_traces").glob("*.parquet"))
    assert [file.name for file in files] == [f"chunk_{i:06d}.parquet" for i in range(4)]
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 10 * (8 + 2 * 4 + 8) and set(rows[0]) == set(SCHEMA.names)
    searches = [row for row in rows if row["shape"] < 0]
    counted = [row for row in searches if row["index"] < 6]  # the second population takes 8 traces
    assert sum(row["verdict"] == "correct" for row in counted) == sum(row["correct"] for row in result["per_problem"])
    assert sum(row["question"] is not None for row in rows) == 10
    for row in rows:
        assert len(row["members"]) == (0 if row["shape"] < 0 else (2, 3)[row["shape"]])
        assert len(row["at_limit"]) == (2 if row["shape"] < 0 else 0) and row["text"]
        assert row["prompt_tokens"] == row["cached_tokens"] + row["computed_tokens"]


def test_interrupted_and_resumed_is_the_same_to_the_bit(whole, tmp_path, stops_after, monkeypatch):
    out = tmp_path / "eval.json"
    stops_after(3)
    with pytest.raises(KeyboardInterrupt):
        evaluate_adapter(config(), None, out)
    monkeypatch.undo()
    assert not out.exists() and len(list((tmp_path / "eval_traces").glob("*.parquet"))) == 2
    with pytest.raises(ConfigError, match="holds traces; go on with them: --resume"):
        evaluate_adapter(config(), None, out)
    with pytest.raises(ConfigError, match="holds traces of another evaluation: there seed is 0, here 1"):
        evaluate_adapter(config("seed=1"), None, out, resume=True)
    message = "there evaluate.rsa is .* choose another --out"
    with pytest.raises(ConfigError, match=message):
        evaluate_adapter(config("evaluate.rsa={population: 4, set_size: 2, steps: 3}"), None, out, resume=True)
    assert evaluate_adapter(config(), None, out, resume=True) == whole[0]
    assert out.read_bytes() == whole[1].read_bytes()
    for a, b in zip(*(sorted((f.parent / "eval_traces").glob("*.parquet")) for f in (out, whole[1])), strict=True):
        assert pq.read_table(a).equals(pq.read_table(b))


def test_other_ks_need_no_new_traces(whole, monkeypatch):
    """Only what no trace depends on may change."""
    monkeypatch.setattr(Store, "write", None)
    more = evaluate_adapter(config("evaluate.pass_at=[1, 3, 6]"), None, whole[1], resume=True)
    assert more["pass_at_k"].items() > whole[0]["pass_at_k"].items()
    picture = whole[1].parent / "eval_majority_at_k.svg"
    assert picture.exists()
    evaluate_adapter(config("evaluate.majority_at=[]"), None, whole[1], resume=True)
    assert not picture.exists()  # no picture of numbers that are not there
    assert evaluate_adapter(config(), None, whole[1], resume=True) == whole[0] and picture.exists()


@pytest.mark.parametrize("of", [2, 5])
def test_shards_together_are_the_whole_to_the_bit(whole, tmp_path, of):
    out = tmp_path / "eval.json"
    order = [*range(2, of + 1), 1]  # any order
    found = [evaluate_adapter(config(), None, out, shard=Shard(number, of)) for number in order]
    assert found[:-1] == [None] * (of - 1) and found[-1] == whole[0] and out.read_bytes() == whole[1].read_bytes()


def test_a_shard_goes_on_too(tmp_path, stops_after, monkeypatch, whole):
    out = tmp_path / "eval.json"
    stops_after(2)
    with pytest.raises(KeyboardInterrupt):
        evaluate_adapter(config(), None, out, shard=Shard(1, 2))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="holds traces of this shard already; go on with them: --resume"):
        evaluate_adapter(config(), None, out, shard=Shard(1, 2))
    assert evaluate_adapter(config(), None, out, shard=Shard(2, 2)) is None
    assert evaluate_adapter(config(), None, out, shard=Shard(1, 2), resume=True) == whole[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_at_random_instants(whole, tmp_path):
    out = tmp_path / "eval.json"
    words = [
        sys.executable,
        "-m",
        "spiral_fast.cli",
        "eval",
        "configs/demo.yaml",
        *SMALL,
        "--out",
        str(out),
        "--resume",
    ]
    rng, killed = random.Random(4), 0
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"}
    while not out.exists():
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        files = len(list(tmp_path.glob("eval_traces/*.parquet")))
        while process.poll() is None and killed < 2:
            if len(list(tmp_path.glob("eval_traces/*.parquet"))) > files:  # a chunk was written: soon after it
                time.sleep(rng.random() * 0.5)
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.01)
        process.wait()
        for file in tmp_path.glob("eval_traces/chunk_*.parquet"):
            pq.read_table(file)  # each is whole
    assert killed == 2 and json.loads(out.read_text()) == whole[0]


def test_an_adapter_is_told_by_its_weights(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    first = adapter_digest(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert adapter_digest(None) is None and first != adapter_digest(str(tmp_path))
    problems = load_problems(config()).eval
    one = identity(config(), {"evaluated": str(tmp_path)}, problems)
    assert one != identity(config(), {"evaluated": None}, problems)
    Store(tmp_path / "t", one)
    Store(tmp_path / "t", identity(config(), {"evaluated": None}, problems))  # nothing sampled yet: may change
    (tmp_path / "t" / "chunk_000000.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match="there adapter.evaluated is None, here '[0-9a-f]{64}'"):
        Store(tmp_path / "t", one)


def test_a_store_gives_back_what_it_was_given(whole, tmp_path):
    problems = load_problems(config()).eval
    samples = read_chunk(whole[1].parent / "eval_traces" / "chunk_000001.parquet", problems[3:6], 24)
    store = Store(tmp_path / "again", {})
    store.write(7, samples)
    assert store.has(7) and not store.has(8) and store.read(7, problems[3:6], 24) == samples
    assert [len(steps) for steps in samples[0].rsa] == [2, 1] and len(samples[0].search) == 8


def test_a_flipped_bit_is_never_measured(whole, tmp_path):
    """In any page; the footer, 1 - 2 % of the file of a real evaluation, has no checksum."""
    problems = load_problems(config()).eval[3:6]
    good = (whole[1].parent / "eval_traces" / "chunk_000001.parquet").read_bytes()
    traces = read_chunk(whole[1].parent / "eval_traces" / "chunk_000001.parquet", problems, 24)
    rng, refused = random.Random(0), 0
    for _ in range(200):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good) - 8 - int.from_bytes(good[-8:-4], "little"))] ^= 1 << rng.randrange(8)
        (tmp_path / "chunk.parquet").write_bytes(flipped)
        try:
            assert read_chunk(tmp_path / "chunk.parquet", problems, 24) == traces  # a bit that nothing reads
        except ConfigError as error:
            assert "is damaged" in str(error)
            refused += 1
    assert refused > 100


def test_a_damaged_chunk_is_named_and_sampled_again(whole, tmp_path):
    """Nothing is measured on fewer, more or other traces than were sampled."""
    out = tmp_path / "eval.json"
    shutil.copytree(whole[1].parent / "eval_traces", tmp_path / "eval_traces")
    chunk = tmp_path / "eval_traces" / "chunk_000001.parquet"
    good = chunk.read_bytes()
    traces = pq.read_table(chunk)
    for content, why in (
        (good[: len(good) // 2], "ArrowInvalid: "),
        (b"", "ArrowInvalid: "),
        ((chunk.parent / "chunk_000002.parquet").read_bytes(), "it has traces of 'parts-"),
        (pa.table({"other": [1]}), "it has traces of None"),
        (traces.slice(0, traces.num_rows - 1), "it has 23 traces, not 24"),
        (pa.concat_tables([traces, traces]), "it has 48 traces, not 24"),
        (pa.concat_tables([traces.slice(1), traces.slice(0, 1)]), "24 different ones in order"),
    ):
        chunk.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, chunk)
        with pytest.raises(
            ConfigError, match=f"chunk_000001.parquet: is damaged .*{why}.*; delete it and go on"
        ) as error:
            evaluate_adapter(config(), None, out, resume=True)
        assert "\n" not in str(error.value) and not out.exists()
    chunk.unlink()
    assert evaluate_adapter(config(), None, out, resume=True) == whole[0]


@pytest.mark.parametrize("content", [None, "{", "[]", "\xff"])
def test_traces_of_nobody_knows_what_are_refused(content, tmp_path):
    Store(tmp_path, {})
    (tmp_path / "chunk_000000.parquet").touch()
    identity_file = tmp_path / "identity.json"
    identity_file.unlink() if content is None else identity_file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="--out: '.*identity.json' cannot be read .*; choose another --out"):
        Store(tmp_path, {})


@pytest.mark.parametrize("command", [["eval"], ["cross", "--search", "base", "--aggregation", "base"]])
def test_out_that_names_no_file_is_one_line(command):
    result = CliRunner().invoke(app, [command[0], "configs/demo.yaml", *command[1:], "--out", ""])
    assert result.exit_code == 2 and "--out: '.' names no file" in result.stderr


def test_chunks():
    assert chunks(10, 3) == [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    assert chunks(2, 32) == [range(0, 2)]


def test_shards_are_parsed():
    assert parse_shard("1/1") == WHOLE and parse_shard("3/4") == Shard(3, 4)
    for text in ("0/2", "3/2", "1", "1/", "a/2", "-1/2", "1/2/3"):
        with pytest.raises(ConfigError, match="--shard: .* is not of the form i/n"):
            parse_shard(text)


def test_interrupt_says_how_to_go_on(monkeypatch, tmp_path):
    import spiral_fast.evaluate_command

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(spiral_fast.evaluate_command, "evaluate_adapter", interrupted)
    result = CliRunner().invoke(app, ["eval", "configs/demo.yaml", "--out", str(tmp_path / "eval.json")])
    assert result.exit_code == 130 and "go on with --resume" in result.stderr


def test_help_shows_examples():
    for command in ("eval", "compare", "cross"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0 and f"spiral-fast {command} " in result.output
        assert f"spiral-fast {command} " in CliRunner().invoke(app, ["--help"]).output
