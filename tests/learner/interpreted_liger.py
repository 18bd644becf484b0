"""Liger's own kernels on the CPU: run in Triton's interpreter by test_liger.py."""

from __future__ import annotations

import liger_kernel.ops.rms_norm
import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from tests.learner.liger_cases import check


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """The interpreter hands floats over as Python's, and knows no libdevice."""
    convert = interpreter._implicit_cvt

    def with_floats(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(liger_kernel.ops.rms_norm, "rsqrt", lambda x: tl.rsqrt(x))


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("llama", {"mlp_bias": True})])
def test_learner_and_engine_with_and_without(family, changes):
    check(family, torch.float32, "cpu", 1e-4, **changes)
