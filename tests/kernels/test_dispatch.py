from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from spiral_kernels import BackendError, available_backends, dispatch, force_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """An operation `toy` with a fast backend for float32 and a plain one for everything."""
    monkeypatch.setattr(dispatch, "_operations", {})
    monkeypatch.setattr(dispatch, "_forced", {})
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    dispatch.register_backends(
        "toy",
        {"fast": lambda device, dtype: None if dtype == torch.float32 else f"not {dtype}", "plain": lambda *_: None},
    )
    dispatch.register_backends("other", {"plain": lambda *_: None})


def choose(dtype=torch.float32, operation="toy"):
    return dispatch.choose_backend(operation, CPU, dtype)


def test_first_that_can():
    assert choose() == "fast"
    assert choose(torch.float64) == "plain"
    assert available_backends("toy", "cpu", torch.float64) == {"fast": "not torch.float64", "plain": None}


def test_forced_by_function():
    force_backend("plain")
    assert choose() == "plain"
    force_backend("fast", "toy")
    assert choose() == "fast"
    with pytest.raises(BackendError, match=r"toy: backend 'fast' \(asked for by force_backend\) cannot serve: not "):
        choose(torch.float64)
    force_backend(None, "toy")
    force_backend(None)
    assert choose(torch.float64) == "plain"


def test_forced_by_environment(monkeypatch):
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "plain")
    assert choose() == "plain"
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "toy=fast, other=plain")
    with pytest.raises(BackendError, match="asked for by SPIRAL_KERNELS_BACKEND"):
        choose(torch.float64)
    force_backend("plain", "toy")
    assert choose() == "plain"


def test_what_does_not_exist(monkeypatch):
    with pytest.raises(BackendError, match="no backend 'slow' of toy; there are: fast, plain"):
        force_backend("slow", "toy")
    with pytest.raises(BackendError, match="no operation 'tyo'; there are: other, toy"):
        force_backend("plain", "tyo")
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "fast")
    with pytest.raises(BackendError, match=r"other has no backend 'fast' .* it has: plain"):
        choose(operation="other")
    monkeypatch.setenv("SPIRAL_KERNELS_BACKEND", "tyo=fast")
    with pytest.raises(BackendError, match="no operation 'tyo'"):
        choose()


def test_no_backend_serves():
    dispatch.register_backends("toy", {"fast": lambda *_: "no such device"})
    with pytest.raises(BackendError, match="no backend serves .*no such device"):
        choose()


WITHOUT_NATIVE = """
import sys
sys.modules["spiral_kernels._native"] = None
import torch, spiral_kernels
print(spiral_kernels.available_backends("linear_logprob"))
for logprob in (
    spiral_kernels.linear_logprob,
    torch.compile(spiral_kernels.linear_logprob, fullgraph=True, backend="eager"),
):
    out = logprob(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 1]))
    torch.testing.assert_close(out.logp, torch.full((2,), -1.3862944))
spiral_kernels.force_backend("native", "linear_logprob")
try:
    spiral_kernels.linear_logprob(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 1]))
except spiral_kernels.BackendError as error:
    print(error)
"""


def test_without_the_native_module():
    """Everything works, compiled too, and a forced native backend says why it cannot serve and what to do."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_NATIVE], capture_output=True, text=True, check=True)
    reasons, error = run.stdout.splitlines()
    assert "'torch': None" in reasons and "not built" in reasons
    assert "install a C++17 compiler" in error


def test_import_is_light():
    """Nothing slow comes with the package: no numba, triton, transformers, and nothing of spiral_fast."""
    code = "import spiral_kernels, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.partition(".")[0] for name in modules}
    assert "spiral_kernels" in packages
    assert not packages & {"numba", "triton", "transformers", "spiral_fast"}
