"""Faults of real servers under a real training: `make test-faults`, half an hour on two busy cores. Not collected
unless this folder is named, and not without SGLang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spiral_fast.rollout.chosen import sglang_installed
from tests.faults.servers import Servers
from tests.faults.summary import Fault, write
from tests.faults.training import ROOT

SUPPORT = ROOT / "tests" / "support"
FAULTS: list[Fault] = []


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    named = any("faults" in str(argument) for argument in config.args)
    return None if named and sglang_installed() else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(1500))


def pytest_configure() -> None:
    if not torch.cuda.is_available():  # servers find the stand-in sgl_kernel
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


@pytest.fixture
def report(runs: Path) -> Callable[[Fault], None]:
    def add(fault: Fault) -> None:
        said = fault.said.replace(str(runs), "runs").replace(str(ROOT), ".")
        FAULTS.append(replace(fault, said=said))

    return add


def pytest_terminal_summary(terminalreporter) -> None:
    for fault in FAULTS:
        terminalreporter.write_line(fault.line())


def pytest_sessionfinish() -> None:
    """FAULTS: the folder of faults.md and faults.json. Only a test that passed reports its fault."""
    if (folder := os.environ.get("FAULTS")) and FAULTS:
        write(FAULTS, Path(folder))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def servers(runs: Path) -> Iterator[Servers]:
    servers = Servers(runs / "servers")
    yield servers
    servers.stop()


@pytest.fixture
def leaves_nothing() -> Iterator[list]:
    """Trainings appended to it are killed after the test."""
    trainings: list = []
    yield trainings
    for training in trainings:
        training.kill()
