from __future__ import annotations

import pytest
from typer.testing import CliRunner

from spiral_fast import serve_command
from spiral_fast.commands import app
from spiral_fast.interrupts import Terminated

DEMO = "configs/demo.yaml"


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", DEMO, *arguments])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-7"])
def test_other_hosts_need_a_key(host, monkeypatch):
    monkeypatch.delenv("SPIRAL_FAST_SERVER_KEY", raising=False)
    monkeypatch.setattr(serve_command, "sglang_installed", lambda: False)
    message = refused("--host", host)
    assert f"--host: {host!r} can be reached from other machines" in message
    assert "set SPIRAL_FAST_SERVER_KEY" in message
    monkeypatch.setenv("SPIRAL_FAST_SERVER_KEY", "k")
    assert "SGLang is not installed; run: " in refused("--host", host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_this_machine_needs_none(host, monkeypatch):
    monkeypatch.delenv("SPIRAL_FAST_SERVER_KEY", raising=False)
    monkeypatch.setattr(serve_command, "sglang_installed", lambda: False)
    assert "SGLang is not installed; run: " in refused("--host", host)


def test_help_shows_the_whole_list_of_servers():
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"})
    assert """'rollout.servers=["http://127.0.0.1:30000"]'""" in result.output


@pytest.mark.parametrize(
    ("stop", "word", "code"), [(KeyboardInterrupt, "interrupted", 130), (Terminated, "terminated", 143)]
)
def test_a_stop_is_one_line_and_an_exit_code(stop, word, code, monkeypatch):
    def stopped(*_):
        raise stop

    monkeypatch.setattr(serve_command, "serve", stopped)
    result = CliRunner().invoke(app, ["serve", DEMO])
    assert (result.exit_code, result.stderr) == (code, f"error: {word}; the server is stopped\n")
