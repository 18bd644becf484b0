"""Where Triton's interpreter serves: tests that need it bear `needs_interpreter`."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest


def interpreter_unusable() -> str | None:
    """Why Triton's interpreter cannot run kernels here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    triton_is, numpy_is = (tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, np))
    if triton_is < (3, 7) and numpy_is >= (2, 4):
        return (
            f"the interpreter of triton {triton.__version__} fails with numpy {np.__version__}: its int() of an array "
            "of one dimension is an error since numpy 2.4; triton 3.7 or numpy 2.3 will do"
        )
    return None


_WHY_NOT = interpreter_unusable()
needs_interpreter = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
