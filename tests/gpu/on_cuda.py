"""Runs an operation's CPU tests on CUDA: inputs and truths stay on the CPU, the operation itself runs on the GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.utils._pytree import tree_map_only

from spiral_kernels import available_backends, force_backend

DEVICE = "cuda"


def moved(function: Callable) -> Callable:
    """`function` with every tensor moved to the GPU before and back after; gradients pass through both ways."""

    @functools.wraps(function)
    def on_cuda(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda x: x.cpu(), function(*args, **kwargs))

    return on_cuda


def cases_of(cases: ModuleType, but: tuple[str, ...] = ()) -> dict[str, Callable]:
    """The tests of a module that take the fixture `backend`, without those named in `but`."""
    return {
        name: test
        for name, test in vars(cases).items()
        if name.startswith("test_") and name not in but and "backend" in inspect.signature(test).parameters
    }


def backend_fixture(cases: ModuleType, operation: str) -> Callable:
    """The fixture `backend`: every CUDA backend forced in turn, and the module's `operation` moved to the GPU."""
    names = available_backends(operation, DEVICE)

    @pytest.fixture(params=names)
    def backend(request, monkeypatch):
        if names[request.param]:
            pytest.skip(names[request.param])
        force_backend(request.param, operation)
        monkeypatch.setattr(cases, operation, moved(getattr(cases, operation)))
        yield request.param
        force_backend(None, operation)

    return backend


def skip_without_cuda() -> None:
    """Called last in a file, so that a machine without CUDA still imports all of it."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device", allow_module_level=True)
