"""A base in 8 or 4 bits on CUDA: learner and engine against the weights that it stands for."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.on_cuda import DEVICE, skip_without_cuda
from tests.learner.quantised_cases import check, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]


@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_learner_and_engine(quantisation, tmp_path):
    check(quantisation, DEVICE, saved(tmp_path))


skip_without_cuda()
