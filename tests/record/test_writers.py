from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.record.recorder import Recorder
from spiral_fast.record.writers import writers as module
from spiral_fast.record.writers.writers import Writers
from tests.record.run_of_three_steps import config_of, make_run, metrics, quiet

FIRST = {"loss": 0.5, "reward/search": 0.25, "problems/live": 3, "grad/norm": float("nan"), "skipped": None}


def config(run: Path, *names: str) -> Config:
    return config_of(run, record={"writers": list(names)})


def silent(line: str) -> None:
    raise AssertionError(line)


def write(run: Path, names: list[str], steps: range, *, rewind: int | None = None) -> None:
    writers = Writers(run, config(run, *names), silent, resume=rewind is not None)
    if rewind is not None:
        writers.rewind(rewind)
    for step in steps:
        writers.scalars(step, FIRST | {"loss": step / 2 + (rewind is not None)})
    writers.close()


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> step -> value, as TensorBoard reads them: an event that starts a session drops what earlier files hold
    from its step on. Each record is a length, its checksum, an Event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]
            if event.session_log.status == SessionLog.START:
                found = {tag: {s: v for s, v in steps.items() if s < event.step} for tag, steps in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard(tmp_path):
    write(tmp_path, ["tensorboard"], range(1, 5))
    found = tensorboard_scalars(tmp_path / "tensorboard")
    assert found == {
        "loss": {1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0},
        "reward/search": dict.fromkeys(range(1, 5), 0.25),
        "problems/live": dict.fromkeys(range(1, 5), 3.0),
    }
    write(tmp_path, ["tensorboard"], range(3, 6), rewind=2)
    found = tensorboard_scalars(tmp_path / "tensorboard")
    assert found["loss"] == {1: 0.5, 2: 1.0, 3: 2.5, 4: 3.0, 5: 3.5}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # also within one second


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_as_its_own_reader_sees_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, ["tensorboard"], range(1, 5))
    write(tmp_path, ["tensorboard"], range(3, 6), rewind=2)
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert reader.Tags()["scalars"] == ["loss", "reward/search", "problems/live"]
    assert [(e.step, e.value) for e in reader.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 2.5), (4, 3.0), (5, 3.5)]


def test_what_was_written_is_on_disk_at_once(tmp_path):
    writers = Writers(tmp_path, config(tmp_path, "tensorboard"), silent)
    writers.scalars(1, FIRST)
    assert tensorboard_scalars(tmp_path / "tensorboard")["loss"] == {1: 0.5}


def test_a_writer_that_fails_is_left_out_with_one_line(tmp_path):
    lines: list[str] = []
    writers = Writers(tmp_path, config(tmp_path, "tensorboard"), lines.append)
    writers.scalars(1, FIRST)
    writers.writers["tensorboard"].events.close()  # as if its file were gone
    for step in (2, 3):
        writers.scalars(step, FIRST)
    writers.close()
    assert len(lines) == 1 and lines[0].startswith("  warning: tensorboard failed and is left out from here on (")
    assert tensorboard_scalars(tmp_path / "tensorboard")["loss"] == {1: 0.5}


def test_one_that_does_not_start_refuses_a_new_run_and_not_a_resumed_one(tmp_path):
    (tmp_path / "tensorboard").touch()  # where its folder would be
    with pytest.raises(ConfigError, match=r"^record.writers: tensorboard does not start \(.*exists") as error:
        Writers(tmp_path, config(tmp_path, "tensorboard"), silent)
    assert "\n" not in str(error.value)
    lines: list[str] = []
    Writers(tmp_path, config(tmp_path, "tensorboard"), lines.append, resume=True).scalars(1, FIRST)
    assert len(lines) == 1 and "left out" in lines[0]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch, name):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"^record.writers: '{name}' needs the package {name}X?; run: pip install "):
        Writers(tmp_path, config(tmp_path, name), silent)
    Writers(tmp_path, config(tmp_path), silent).scalars(1, FIRST)  # nothing is needed for no writer


def test_names_are_checked(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: r\nmodel: {path: builtin:parts}\nproblems: {source: parts}\n")
    with pytest.raises(ConfigError, match="record.writers.*'wandb' or 'trackio'"):
        load_config(file, ["record.writers=[csv]"])
    with pytest.raises(ConfigError, match="named twice"):
        load_config(file, ["record.writers=[wandb,wandb]"])


SCRIPT = """
import sys
from pathlib import Path
from tests.record.test_writers import write
run, name, first, last, rewind = sys.argv[1:]
write(Path(run), [name], range(int(first), int(last)), rewind=int(rewind) if rewind else None)
"""


def in_a_process(run: Path, name: str, first: int, last: int, rewind: str = "") -> None:
    """In a process of its own, without a network: both keep threads and a handler at exit."""
    environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(run / "store"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(run), name, str(first), str(last), rewind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def wandb_records(file: Path):
    """The records of an offline run: a LevelDB log of 32 KiB blocks behind a header of 7 bytes. Each fragment has a
    checksum (4 bytes), a length (2) and a type (1): 1 whole, 2 first, 3 middle, 4 last."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no room for a fragment: the block's rest is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_offline_goes_on_with_the_same_run(tmp_path):
    in_a_process(tmp_path, "wandb", 1, 4)
    in_a_process(tmp_path, "wandb", 4, 6, rewind="3")
    name = (tmp_path / "wandb_name.txt").read_text().strip()
    found, projects = [], set()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        assert file.name == f"run-{name}.wandb"
        for record in wandb_records(file):
            if record.HasField("history"):
                row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                found.append((record.history.step.num, json.loads(row["loss"])))
            if record.HasField("run"):
                projects.add(record.run.project)
    assert found == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 3.0), (5, 3.5)]
    assert projects == {"spiral-fast"}


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs trackio")
def test_trackio_goes_on_with_the_same_run(tmp_path):
    import sqlite3

    in_a_process(tmp_path, "trackio", 1, 4)
    in_a_process(tmp_path, "trackio", 4, 6, rewind="3")
    (file,) = (tmp_path / "store").glob("spiral-fast*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name for name, _, _ in rows} == {(tmp_path / "trackio_name.txt").read_text().strip()}
    assert [(step, json.loads(metrics)["loss"]) for _, step, metrics in rows] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 3.0),
        (5, 3.5),
    ]


def test_the_recorder_hands_on_steps_and_evaluations(tmp_path):
    run = make_run(tmp_path / "run")
    found = tensorboard_scalars(run / "tensorboard")
    assert found["evaluation/pass@4"].keys() == {0} and found["evaluation/RSA step 1"][0] == pytest.approx(0.6)
    assert found["reward/aggregation"] == pytest.approx({1: 0.2, 2: 0.4, 3: 0.6})
    assert "skipped" not in found and "grad/norm_search" not in found


def test_a_resumed_run_takes_back_what_it_makes_again(tmp_path):
    run = make_run(tmp_path / "run", finished=False)
    with Recorder(run, config_of(run), quiet()[0], resume=True) as record:
        record.rewind(1)
        record.metrics(2, metrics(2) | {"grad/norm": 8.0})
    assert tensorboard_scalars(run / "tensorboard")["grad/norm"] == {1: 0.5, 2: 8.0}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["grad/norm"]) for row in rows] == [(1, 0.5), (2, 8.0)]


def test_a_failing_writer_does_not_stop_the_recorder(tmp_path):
    console, text = quiet()
    with Recorder(tmp_path, config_of(tmp_path), console) as record:
        record.writers.writers["tensorboard"].events.close()
        for step in (1, 2):
            record.metrics(step, metrics(step))
    assert text.getvalue().count("warning: tensorboard failed") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
