"""The length gate (Appendix A, equation 10): the last step of every credit."""

from __future__ import annotations

import numpy as np


def gate(credit: np.ndarray, length: np.ndarray, target: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Set positive credit of traces longer than `target` (L_target, tokens) to 0; None = off.

    credit (S,) float, length (S,) int -> credit after the gate, and where it acted (S,) bool. The paper leaves
    length = target open: we keep that credit.
    """
    if target is None:
        return credit, np.zeros(len(credit), bool)
    gated = (credit > 0) & (length > target)
    return np.where(gated, 0.0, credit), gated
