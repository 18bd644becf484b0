"""Real SGLang servers for the tests of this folder, and for every other test that wants one.

`make test-sglang` runs them in an environment of their own; without SGLang they are left out. A start takes half a
minute, so `server` is one for the whole session: leave it as you found it (unload your adapters, whose names no other
test uses). A test that ends or freezes its server starts its own with `start_server`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from spiral_fast.config import Config
from spiral_fast.rollout.chosen import sglang_installed
from spiral_fast.rollout.sglang.base_model import base_model
from spiral_fast.rollout.sglang.server import ServerProcess
from tests.sglang.tiny_server import make_config, save_model

SUPPORT = Path(__file__).resolve().parents[1] / "support"

if not sglang_installed():
    collect_ignore_glob = ["test_[!i]*.py"]  # test_installed.py says so in one line
elif not torch.cuda.is_available():  # the servers that tests start find the stand-in sgl_kernel
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))  # a server may start in it


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves `model_folder`: adapters of rank up to 8 on all linear layers, a cache of 8192 tokens. Flushed by no one
    but who asks for it."""
    config = make_config(model_folder, lora={"rank": 8})
    log = tmp_path_factory.mktemp("server") / "server.log"
    process = ServerProcess(config, base_model(config.model), log)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[Config], ServerProcess]]:
    """Starts a server for a config; it is gone after the test."""
    started: list[ServerProcess] = []

    def start(config: Config) -> ServerProcess:
        process = ServerProcess(config, base_model(config.model), tmp_path / f"server{len(started)}.log")
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.stop(at_once=True)
