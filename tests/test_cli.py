"""The command line as a user meets it: help, one-line errors, exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.install import install_command
from tests.record.run_of_three_steps import make_run

ROOT = Path(__file__).resolve().parents[1]
DEMO = str(ROOT / "configs" / "demo.yaml")


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def one_error_line(result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    return result.stderr


def test_help_teaches_by_example():
    result = run("--help")
    assert result.exit_code == 0
    for line in ("spiral-fast train configs/demo.yaml", "spiral-fast report runs/demo", "doctor", "bench", "eval"):
        assert line in result.output
    for command in ("train", "eval", "report", "bench", "doctor"):
        assert run(command, "--help").exit_code == 0


def test_version():
    assert run("--version").output.startswith("spiral-fast ")


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from spiral_fast.commands import app\n"
        "for option in ('--help', '--version'):\n"
        "    assert CliRunner().invoke(app, [option]).exit_code == 0\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    assert python(code).returncode == 0


@pytest.mark.parametrize(("module", "package"), [("typer", "typer"), ("yaml", "pyyaml")])
def test_a_missing_extra_is_one_line_with_the_command(module, package):
    code = f"import sys\nsys.modules['{module}'] = None\nfrom spiral_fast.cli import main\nmain()\n"
    result = python(code)
    assert result.returncode == 1
    assert result.stderr == f"spiral-fast: {package} not installed; run: {install_command('train')}\n"


def test_a_package_missing_later_is_one_line_with_the_command():
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nfrom spiral_fast.cli import main\n"
        f"sys.argv = ['spiral-fast', 'report', '{ROOT}']\nmain()\n"
    )
    result = python(code)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert f"matplotlib is not installed; run: {install_command('train')}" in result.stderr


@pytest.mark.parametrize("command", ["train", "eval"])
def test_config_errors_are_one_line_and_exit_2(command, tmp_path):
    assert "no such file" in one_error_line(run(command, str(tmp_path / "none.yaml")), 2)
    assert "did you mean learner.steps?" in one_error_line(run(command, DEMO, "learner.step=3"), 2)
    assert "rollout.top_p" in one_error_line(run(command, DEMO, "rollout.top_p=0.9"), 2)


def test_train_refuses_a_folder_with_a_run_before_loading_anything(tmp_path):
    make_run(tmp_path, steps=0, finished=False)
    assert "already holds a run" in one_error_line(run("train", DEMO, f"run_dir={tmp_path}"), 2)


def unusable(tmp_path: Path) -> dict[str, str]:
    """Folders that no run can be written to."""
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    return {
        "a file": str(file),
        "under a file": str(file / "deep" / "run"),
        "a dangling link": str(tmp_path / "dangling"),
        "not creatable": "/proc/spiral/run",
        "nul": f"{tmp_path}/a\0b",
        "long name": str(tmp_path / ("r" * 300)),
        "long path": str(tmp_path) + "/folder" * 700,
    }


UNUSABLE = ("a file", "under a file", "a dangling link", "not creatable", "nul", "long name", "long path")


@pytest.fixture
def nothing_loads(monkeypatch):
    """A run that gets as far as its problems and model fails the test."""
    import spiral_fast.dry_run
    import spiral_fast.set_up
    import spiral_fast.train

    def loads(config):
        raise AssertionError("the model would be loaded")

    for module in (spiral_fast.set_up, spiral_fast.train, spiral_fast.dry_run):
        monkeypatch.setattr(module, "set_up", loads)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("case", UNUSABLE)
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_model_is_loaded(case, more, tmp_path, nothing_loads):
    folder = unusable(tmp_path)[case]
    before = sorted(tmp_path.rglob("*"))
    quoted = json.dumps(folder)  # YAML knows JSON's escapes
    line = one_error_line(run("train", DEMO, f"run_dir={quoted}", *more), 2)
    assert line.startswith("error: run_dir: ") and "cannot be written to (" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_checking_a_folder_leaves_nothing_behind(tmp_path):
    from spiral_fast.record.files import refuse_unwritable

    refuse_unwritable("run_dir", tmp_path / "a" / ".." / "b" / "c")
    refuse_unwritable("run_dir", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_eval_refuses_a_place_for_its_numbers_before_it_samples(tmp_path, nothing_loads):
    places = unusable(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "figures_rsa.svg").write_text("<svg/>")
    (tmp_path / "figures_2_rsa.svg").write_text("<svg/>")
    assert "cannot be written to" in one_error_line(run("eval", DEMO, "--out", places["under a file"]), 2)
    assert "cannot be written to" in one_error_line(run("eval", DEMO, "--out", places["long name"]), 2)
    for taken in (tmp_path, tmp_path / "old.json", tmp_path / "figures.json"):
        assert "exists already; choose another --out" in one_error_line(run("eval", DEMO, "--out", str(taken)), 2)
    result = run("eval", DEMO, "--out", str(tmp_path / "new" / "figures.json"))
    assert isinstance(result.exception, AssertionError) and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.cache_tokens=100"], "rollout.cache_tokens"),
        (["rollout.cache_tokens=200", "evaluate.rsa.set_size=8"], "rollout.cache_tokens"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_what_cannot_run_is_refused_before_the_folder_is_made(overrides, key, more, tmp_path):
    sizes = ["problems.train_size=8", "problems.eval_size=4", "threads=1", f"run_dir={tmp_path / 'run'}"]
    result = run("train", DEMO, *sizes, *overrides, *more)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"error: {key}: ")  # before it, the bar of loading the model
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("forced", ["linear_logprob=abacus", "set_advantages=abacus", "abacus", "add=torch"])
def test_a_backend_that_cannot_serve_is_one_line(command, forced, tmp_path, monkeypatch):
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", forced)
    monkeypatch.chdir(tmp_path)
    line = one_error_line(run(command, DEMO, f"run_dir={tmp_path / 'run'}"), 2)
    assert line.startswith("error: SPIRAL_KERNELS_BACKEND: ") and list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_one_line_and_the_last_checkpoint_is_whole(tmp_path):
    """The first step's optimiser moments are the first file above the limit."""
    overrides = ["problems.train_size=8", "problems.eval_size=2", "threads=1", "batch.live_problems=8"]
    overrides += ["evaluate={samples: 2, pass_at: [1], majority_at: [], rsa: {steps: 0}, bootstrap: 20}"]
    overrides += ["learner.steps=2", "record.save_every=1"]
    run = tmp_path / "run"
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"sys.argv = ['spiral-fast', 'train', {DEMO!r}, 'run_dir={run}', *{overrides!r}]\n"
        "from spiral_fast.cli import main\nmain()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: {run / 'checkpoints' / 'step_000001'}: cannot be written (")
    assert "File too large" in line and line.endswith("what was written before is whole")
    assert json.loads((run / "metrics.jsonl").read_text())["step"] == 1
    assert [file.name for file in (run / "checkpoints").glob("*step*")] == ["step_000000"]
    done = subprocess.run(
        [sys.executable, "-m", "spiral_fast.cli", "train", "--resume", str(run)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout and "step 2/2" in done.stdout


@pytest.mark.parametrize("began", [False, True])
def test_interrupt_says_where_the_run_lies(monkeypatch, tmp_path, began):
    import spiral_fast.train

    def interrupted(config, resume):
        if began:
            make_run(Path(config.run_dir), steps=1, finished=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(spiral_fast.train, "train", interrupted)
    folder = tmp_path / "run"
    line = one_error_line(run("train", DEMO, f"run_dir={folder}"), 130)
    assert (f"spiral-fast train --resume {folder}" in line) == began
    assert ("nothing was written" in line) != began


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "inter")]
)
def test_a_signal_while_everything_is_loaded_is_one_line(tmp_path, number, code, word):
    """The reader of a named pipe waits for a writer, so that the process stands in its set-up."""
    os.mkfifo(tmp_path / "rows.jsonl")
    source = f"problems={{source: jsonl, train_file: {tmp_path / 'rows.jsonl'}}}"
    command = [
        sys.executable,
        "-m",
        "spiral_fast.cli",
        "train",
        DEMO,
        "model.path=x",
        source,
        f"run_dir={tmp_path / 'r'}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with (tmp_path / "rows.jsonl").open("w"):  # opens once the process reads
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert said.startswith(f"error: {word}") and said.endswith("nothing was written\n") and said.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_eval_names_an_adapter_that_is_no_folder(tmp_path):
    assert "--adapter" in one_error_line(run("eval", DEMO, "--adapter", str(tmp_path / "none")), 2)
    after_option = run("eval", DEMO, "--adapter", str(tmp_path), "learner.step=3")
    assert "did you mean learner.steps?" in one_error_line(after_option, 2)


def test_report_writes_and_prints_the_path(tmp_path):
    make_run(tmp_path, steps=1)
    result = run("report", str(tmp_path))
    assert result.exit_code == 0 and result.output.strip() == str(tmp_path / "report.html")
    assert "holds no run" in one_error_line(run("report", str(tmp_path / "none")), 2)


def test_bench_runs_a_suite_of_a_checkout_only(tmp_path):
    from spiral_fast.bench_command import run_suites
    from spiral_fast.config import ConfigError

    with pytest.raises(ConfigError, match="part of a checkout"):
        run_suites("", tmp_path)
    suite = tmp_path / "bench" / "echo"
    suite.mkdir(parents=True)
    (suite / "run.py").write_text("def run():\n    print('ran')\n")
    with pytest.raises(ConfigError, match="no suite 'x'; there are: echo"):
        run_suites("x", tmp_path)
    with pytest.raises(ConfigError, match="--engine: 'x' of 'echo' has no bench; there is: rollout, sglang"):
        run_suites("echo", tmp_path, engine="x")
    code = "import pathlib, sys; from spiral_fast.bench_command import run_suites; run_suites('', pathlib.Path({!r}))"
    assert python(code.format(str(tmp_path))).stdout == "ran\n"


def test_doctor_names_the_backend_of_each_operation(monkeypatch):
    result = run("doctor")
    assert result.exit_code == 0
    for word in (
        *("torch", "linear_logprob", "set_advantages", "native module:", "CPU:", "rollout engine: radix"),
        *("liger-kernel (model.liger, on a GPU): ", "flash-attn (", "bitsandbytes (", "several ranks: gloo"),
    ):
        assert word in result.output
    monkeypatch.setenv("COLUMNS", "200")  # else the words may be wrapped
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "linear_logprob=abacus")
    assert "no backend 'abacus'" in run("doctor").output


def test_doctor_says_what_is_missing_and_how_to_add_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert f"missing gguf (GGUF models): {install_command('train')}" in run("doctor").output


def test_doctor_says_what_a_run_would_take(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = run("doctor", "configs/demo.yaml", "device=cpu").output
    for line in (
        "device: cpu",
        "rollout engine: radix",
        "tree_attention by ",
        "Liger: not used (its kernels run on CUDA",
    ):
        assert line in output
    assert "Liger: not used (model.liger is false)" in run("doctor", "configs/demo.yaml", "model.liger=false").output
    monkeypatch.setattr("spiral_fast.rollout.chosen.sglang_installed", lambda: False)
    for refused in ("rollout.engine=sglang", "model.liger=true"):  # in the words of train
        assert "cannot be used: " in run("doctor", "configs/demo.yaml", "device=cpu", refused).output
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "tree_attention=cascade_flash_attn")
    cannot = run("doctor", "configs/demo.yaml", "device=cpu")
    assert (
        cannot.exit_code == 0
        and "SPIRAL_KERNELS_BACKEND: tree_attention: backend 'cascade_flash_attn'" in cannot.output
    )
    assert run("doctor", "configs/nowhere.yaml").exit_code == 2
