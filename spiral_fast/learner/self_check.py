"""The first micro-batch of a run, computed a second time without sharing: a wrong tree must not train a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spiral_fast import ranks
from spiral_fast.learner.packed import pack
from spiral_fast.learner.rows import Row
from spiral_fast.learner.step_stats import norm

if TYPE_CHECKING:
    from spiral_fast.learner.learner import Learner

# How far two right computations of the same gradient may be apart, relative to its norm, by the dtype of the model.
# Shapes decide the order of a GEMM's sums. float32: right ones differ by 3e-7 (builtin:parts) and 3e-5 (SmolLM2-135M).
# 16 bits: each activation is rounded at 4e-3; right ones differ by 0.003 and 0.016, of six short rows by 0.14.
LARGEST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.3}


class SharingDiffers(FloatingPointError):
    """The gradient with shared prefixes is not the flat one; the message has the figures."""


def check_against_flat(learner: Learner, rows: Sequence[Row], logp: torch.Tensor, *, forwards: int) -> None:
    """Raise SharingDiffers unless the learner's gradient, which must be that of `rows` alone, is up to rounding the sum
    of each row's own. logp (R,): the log-probs that came with it, row after row. The gradient is left as it was.

    On several ranks it is called on all with their own rows, each runs `forwards` (>= len(rows)) forwards and
    backwards, and all raise when one finds a difference.

    Rounding is relative to the root of the rows' summed squares where that is larger than the norm of the sum: the
    gradients of equal traces with opposite credits cancel, their rounding does not."""
    shared = learner.gradient()
    parameters = list(learner.parameters.values())
    kept = [parameter.grad for parameter in parameters]
    flat, flat_logp, squares = torch.zeros_like(shared), [], 0.0
    for row in rows:
        for parameter in parameters:
            parameter.grad = None
        alone = pack([(row.prompt, row.tokens)], learner.device, learner.policy.roles.of(row.level))
        out, _ = learner.loss_and_gradient([row], alone)
        gradient = learner.gradient()
        flat += gradient
        squares += norm(gradient) ** 2
        flat_logp.append(out.logp)
    for _ in range(forwards - len(rows)):
        learner.loss_and_gradient([], pack([([0], [0])], learner.device))
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient

    def compare() -> None:
        if not rows or not shared.isfinite().all():  # reported as such by the step
            return
        size = max(norm(flat), math.sqrt(squares))
        difference = norm(shared - flat) / max(size, torch.finfo(flat.dtype).tiny)
        limit = LARGEST_DIFFERENCE[learner.policy.model.get_base_model().dtype]
        if not difference <= limit:
            gap = (logp - torch.cat(flat_logp)).abs().max().item()
            raise SharingDiffers(
                f"learner.sharing {learner.config.sharing!r}: the gradient of the first micro-batch ({len(rows)} rows) "
                f"differs from the one without sharing by {difference:.2g} of its norm (rounding explains {limit:g}), "
                f"its log-probs by up to {gap:.2g} nats. Set learner.sharing: none, and report this model and config"
            )

    ranks.on_each(compare)
