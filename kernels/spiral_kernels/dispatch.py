"""Which backend serves an operation: the first of its list that can, unless one is forced.

Force one with the environment variable SPIRAL_KERNELS_BACKEND (`torch`, or `linear_logprob=torch,set_advantages=numba`)
or with `force_backend`. A forced backend that cannot serve raises BackendError with the reason; nothing else is tried.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable

import torch

ENVIRONMENT_VARIABLE = "SPIRAL_KERNELS_BACKEND"
# Found here, once: torch.compile traces neither find_spec nor a failing import.
_INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("triton", "flash_attn")}


def _load_native() -> str | None:
    try:
        import spiral_kernels._native  # noqa: F401
    except ModuleNotFoundError:
        return (
            "spiral_kernels._native is not built (no working C++ compiler or CMake when spiral-fast was installed); "
            "on CPU slower backends run instead; "
            "install a C++17 compiler and CMake >= 3.20, then reinstall spiral-fast"
        )
    except ImportError as error:
        return f"spiral_kernels._native does not load: {error}"
    return None


_NATIVE_UNAVAILABLE = _load_native()

# A backend says why it cannot serve tensors of this device and dtype; None if it can.
WhyNot = Callable[[torch.device, torch.dtype], str | None]

_operations: dict[str, dict[str, WhyNot]] = {}
_forced: dict[str | None, str] = {}  # by operation; None = all operations


class BackendError(RuntimeError):
    """The backend asked for cannot serve; the message says why."""


def register_backends(operation: str, backends: dict[str, WhyNot]) -> None:
    """Declare the backends of an operation, fastest first."""
    _operations[operation] = backends


def operations() -> list[str]:
    """Names of the operations that have backends."""
    return list(_operations)


def available_backends(
    operation: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, str | None]:
    """Each backend of the operation, fastest first, with None if it can serve `device` and `dtype`, else the reason."""
    device = torch.device(device)
    return {name: why_not(device, dtype) for name, why_not in _backends_of(operation).items()}


def force_backend(name: str | None, operation: str | None = None) -> None:
    """Use backend `name` for `operation` (None: for all) from now on in this process; `name=None` lifts that again.

    Takes precedence over the environment variable; one operation's over all operations'.
    """
    if operation is not None:
        _backends_of(operation)
    if name is None:
        _forced.pop(operation, None)
        return
    known = _backends_of(operation) if operation else {b for backends in _operations.values() for b in backends}
    if name not in known:
        raise BackendError(f"no backend {name!r}{f' of {operation}' if operation else ''}; there are: {_list(known)}")
    _forced[operation] = name


def choose_backend(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that serves `operation` on tensors of this device and dtype. Raises BackendError."""
    backends = _backends_of(operation)
    name, by = _forced_backend(operation)
    if name is None:
        for name, why_not in backends.items():
            if why_not(device, dtype) is None:
                return name
        raise BackendError(
            f"{operation}: no backend serves {dtype} on {device}: {available_backends(operation, device, dtype)}"
        )
    if name not in backends:
        raise BackendError(f"{operation} has no backend {name!r} (asked for by {by}); it has: {_list(backends)}")
    reason = backends[name](device, dtype)
    if reason is not None:
        raise BackendError(f"{operation}: backend {name!r} (asked for by {by}) cannot serve: {reason}")
    return name


def native_unavailable() -> str | None:
    """Why the compiled module spiral_kernels._native cannot be used; None if it can."""
    return _NATIVE_UNAVAILABLE


@functools.cache
def flash_attn_unusable() -> str | None:
    """Why the package flash-attn cannot serve; None if it can. Its functions are those of 2.7 and later 2.x."""
    if not _INSTALLED["flash_attn"]:
        return "flash-attn is not installed"
    try:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward  # noqa: F401
    except (ImportError, OSError) as error:  # built for another torch, or without these functions
        return f"flash-attn does not load: {' '.join(str(error).split())[:200]}"
    return None


def triton_unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device; None if they can: on CUDA, or interpreted on a CPU."""
    if not _INSTALLED["triton"]:
        return "triton is not installed (it comes with CUDA builds of torch)"
    if device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return f"it runs on CUDA only, the tensors are on {device}"


def _backends_of(operation: str) -> dict[str, WhyNot]:
    if operation not in _operations:
        raise BackendError(f"no operation {operation!r}; there are: {_list(_operations)}")
    return _operations[operation]


def _forced_backend(operation: str) -> tuple[str | None, str]:
    for key in (operation, None):
        if key in _forced:
            return _forced[key], "force_backend"
    return _environment(os.environ.get(ENVIRONMENT_VARIABLE, "")).get(operation), ENVIRONMENT_VARIABLE


def _environment(value: str) -> dict[str, str]:
    """`torch` -> that backend for all operations; `a=torch,b=numba` -> by operation."""
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in value.split(","))):
        operation, equals, name = item.rpartition("=")
        if equals:
            _backends_of(operation)
            chosen[operation] = name
        else:
            for known in _operations:
                chosen.setdefault(known, name)
    return chosen


def _list(names) -> str:
    return ", ".join(sorted(names))
