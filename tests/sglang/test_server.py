"""Servers that do not start, die, freeze, or whose starter dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spiral_fast.rollout.sglang.base_model import base_model
from spiral_fast.rollout.sglang.client import Client, RequestRefused, ServerLost
from spiral_fast.rollout.sglang.server import ServerFailed, ServerProcess
from tests.sglang.processes import family, none_left
from tests.sglang.test_client import PROMPTS, sample, with_client
from tests.sglang.tiny_server import make_config

ROOT = Path(__file__).resolve().parents[2]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def make_server(config, tmp_path, **options) -> ServerProcess:
    return ServerProcess(config, base_model(config.model), tmp_path / "server.log", **options)


def test_frozen_then_awake_then_killed(start_server, model_folder):
    server = start_server(make_config(model_folder, rollout={"sglang": {"timeout_s": 3.0}}))
    processes = family(server.pid)
    assert len(processes) >= 3  # itself, scheduler, detokenizer

    async def use():
        client = Client(server.url, server.api_key, timeout_s=3.0)
        pending = asyncio.ensure_future(sample(client, PROMPTS[0], None, max_new_tokens=200))
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        assert not await client.alive(1.0)
        with pytest.raises(ServerLost, match="no answer in 3 s"):
            await asyncio.gather(pending, sample(client, PROMPTS[0], None))
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert await client.alive(30.0)
        assert (await sample(client, PROMPTS[0], None)).tokens
        pending = [asyncio.ensure_future(sample(client, [9, n], None, max_new_tokens=200)) for n in range(6, 40)]
        await asyncio.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        out = await asyncio.gather(*pending, return_exceptions=True)
        lost = [error for error in out if isinstance(error, ServerLost)]
        assert lost and all(isinstance(one, ServerLost) or one.tokens for one in out)
        assert not await client.alive(5.0)
        await client.aclose()

    asyncio.run(use())
    assert none_left(processes)
    assert not server.running()
    server.stop()


def test_scheduler_that_dies_takes_its_server_with_it_and_not_us(start_server, model_folder):
    server = start_server(make_config(model_folder))
    processes = family(server.pid)
    (scheduler,) = (process for process in processes if "scheduler" in " ".join(process.cmdline()))

    async def use(client):
        scheduler.kill()
        with pytest.raises(ServerLost):
            while True:
                await sample(client, PROMPTS[0], None)

    with_client(server, use)
    assert none_left(processes)


STARTER = """
import json, sys, threading, time
from pathlib import Path
from spiral_fast.rollout.sglang.base_model import base_model
from spiral_fast.rollout.sglang.server import ServerProcess
from tests.sglang.tiny_server import make_config

config = make_config(sys.argv[1])
server = ServerProcess(config, base_model(config.model), Path(sys.argv[2]))
starting = threading.Thread(target=server.start)
starting.start()
if sys.argv[3] == "started":
    starting.join()
while server.pid is None:
    time.sleep(0.01)
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["starting", "started"])
def test_kill_9_of_who_started_it_leaves_no_orphan(model_folder, tmp_path, when):
    command = [sys.executable, "-c", STARTER, str(model_folder), str(tmp_path / "server.log"), when]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        time.sleep(3.0 if when == "starting" else 0.0)
        processes = family(pid)
        assert len(processes) >= (1 if when == "starting" else 3)
        starter.kill()
    assert none_left(processes)


def test_unknown_flag(model_folder, tmp_path):
    config = make_config(model_folder, rollout={"sglang": {"args": {"no_such_flag": 1}}})
    server = make_server(config, tmp_path)
    with pytest.raises(ServerFailed) as failed:
        server.start()
    message = str(failed.value)
    assert "the SGLang server ended with exit code 2" in message
    assert str(tmp_path / "server.log") in message
    assert "unrecognized arguments: --no-such-flag 1" in message.splitlines()[-1]
    assert not server.running()


def test_port_in_use(model_folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed, match=f"port {port} of 127.0.0.1 cannot be used .Address already in use"):
            make_server(make_config(model_folder), tmp_path, port=port).start()


def test_start_deadline(model_folder, tmp_path):
    before = {process.pid for process in children()}
    server = make_server(make_config(model_folder, rollout={"sglang": {"start_timeout_s": 4.0}}), tmp_path)
    with pytest.raises(ServerFailed, match=r"does not generate yet \(rollout.sglang.start_timeout_s: 4\)"):
        server.start()
    assert none_left([process for process in children() if process.pid not in before])


def test_ctrl_c_while_it_starts(model_folder, tmp_path):
    before = {process.pid for process in children()}
    server = make_server(make_config(model_folder), tmp_path)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.alarm(4)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert none_left([process for process in children() if process.pid not in before])


def serve(model_folder, tmp_path, **environment) -> subprocess.Popen:
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(make_config(model_folder, tmp_path / "run").model_dump(mode="json")))
    command = [sys.executable, "-m", "spiral_fast.cli", "serve", str(config), "--log", str(tmp_path / "serve.log")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command += ["--port", str(probe.getsockname()[1])]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("number", "code", "key"), [(signal.SIGTERM, 143, "a-key"), (signal.SIGINT, 130, "")], ids=["term", "ctrl-c"]
)
def test_spiral_fast_serve(model_folder, tmp_path, number, code, key):
    process = serve(model_folder, tmp_path, SPIRAL_FAST_SERVER_KEY=key)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        processes = family(process.pid)
        url = lines[1].split()[-1]
        assert lines[1] == f"serving {model_folder} at {url}\n"
        assert lines[2] == f"train on it: spiral-fast train CONFIG 'rollout.servers=[\"{url}\"]'\n"
        assert len(processes) >= 4
        if key:
            assert not any(key in " ".join(one.cmdline()) for one in processes)

        async def use(client):
            assert (await sample(client, PROMPTS[0], None)).tokens

        process.url, process.api_key = url, key or None
        with_client(process, use)
        if key:
            process.api_key = None
            with pytest.raises(RequestRefused, match="SPIRAL_FAST_SERVER_KEY"):
                with_client(process, use)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        word = "terminated" if code == 143 else "interrupted"
        assert errors.splitlines()[-1] == f"error: {word}; the server is stopped"
        assert "Traceback" not in errors
        assert none_left(processes)
    finally:
        process.kill()
        process.wait()
