"""How far two right computations of the same log-probs may be apart, nats a token, by the dtype of the model.

float32: the largest gap. Right ones differ by up to 8e-6 (builtin:parts) and 3e-5 (SmolLM2-135M, 30 layers); a
temperature wrong by 1 % by 0.06 and 0.14, one matrix of builtin:parts off by 2 % by 6e-4.

16 bits: the mean gap, of the size that the loading probe allows (learner/probe.py). Right ones differ by 0.003
(builtin:parts) and 0.05 (SmolLM2-135M) in the mean, single tokens by 0.5. A temperature wrong by 5 % stays below it:
that is why such a model is checked in float32 too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spiral_fast.learner.probe import LARGEST_GAP_16_BIT
from spiral_fast.verify.result import Result, within

LARGEST_FLOAT32 = 2e-4


def compare(a: Sequence[np.ndarray], b: Sequence[np.ndarray], dtype: torch.dtype, note: str) -> Result:
    """Pairs of log-probs of the same tokens, computed in two ways by a model of `dtype`."""
    gap = np.abs(np.concatenate(list(a)).astype(np.float64) - np.concatenate(list(b)))
    mean, largest = float(gap.mean()), float(gap.max())
    note = f"{gap.size:,} tokens, {note}"
    values = {"mean": mean, "max": largest, "tokens": gap.size}
    if dtype in (torch.bfloat16, torch.float16):
        return within(mean, LARGEST_GAP_16_BIT, f"mean gap {{}}, max {largest:.2g} nats", note, **values)
    return within(largest, LARGEST_FLOAT32, f"max gap {{}}, mean {mean:.2g} nats", note, **values)
