"""The command line as a user meets it: help, one-line errors, exit codes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spiral_fast.commands import app
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
    assert result.stderr == f"spiral-fast: {package} not installed; run: pip install 'spiral-fast[train]'\n"


def test_a_package_missing_later_is_one_line_with_the_command():
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nfrom spiral_fast.cli import main\n"
        f"sys.argv = ['spiral-fast', 'report', '{ROOT}']\nmain()\n"
    )
    result = python(code)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "matplotlib is not installed; run: pip install 'spiral-fast[train]'" in result.stderr


@pytest.mark.parametrize("command", ["train", "eval"])
def test_config_errors_are_one_line_and_exit_2(command, tmp_path):
    assert "no such file" in one_error_line(run(command, str(tmp_path / "none.yaml")), 2)
    assert "did you mean learner.steps?" in one_error_line(run(command, DEMO, "learner.step=3"), 2)
    assert "rollout.top_p" in one_error_line(run(command, DEMO, "rollout.top_p=0.9"), 2)


def test_train_refuses_a_folder_with_a_run_before_loading_anything(tmp_path):
    make_run(tmp_path, steps=0, finished=False)
    assert "already holds a run" in one_error_line(run("train", DEMO, f"run_dir={tmp_path}"), 2)


@pytest.mark.parametrize("began", [False, True])
def test_interrupt_says_where_the_run_lies(monkeypatch, tmp_path, began):
    import spiral_fast.train

    def interrupted(config):
        if began:
            make_run(Path(config.run_dir), steps=1, finished=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(spiral_fast.train, "train", interrupted)
    folder = tmp_path / "run"
    line = one_error_line(run("train", DEMO, f"run_dir={folder}"), 130)
    assert (f"the run so far lies in {folder}" in line) == began
    assert ("nothing was written" in line) != began


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
    code = "import pathlib, sys; from spiral_fast.bench_command import run_suites; run_suites('', pathlib.Path({!r}))"
    assert python(code.format(str(tmp_path))).stdout == "ran\n"


def test_doctor_names_the_backend_of_each_operation(monkeypatch):
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("torch", "linear_logprob", "set_advantages", "native module:", "CPU:"):
        assert word in result.output
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "linear_logprob=abacus")
    assert "no backend 'abacus'" in run("doctor").output


def test_doctor_says_what_is_missing_and_how_to_add_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert "missing gguf (GGUF models): pip install 'spiral-fast[train]'" in run("doctor").output
