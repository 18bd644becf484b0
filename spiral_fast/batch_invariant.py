"""Forwards whose result for one row has the same bits whatever the other rows: engine and learner agree exactly.

Four things depend on the company in an ordinary forward. A GEMM of few rows sums in another order than one of many:
here every forward has a multiple of ROWS rows, from which on MKL's float32 kernels sum each row alike
(`check_linear_layers` tries it). Attention depends on how keys are tiled: PathAttention counts tiles from a path's
first token. The head's tiles depend on its number of rows: `log_probs` calls it with HEAD_ROWS rows each time. And
torch rounds an activation otherwise where a thread's share is no multiple of the vector length (`check_activation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.activations import ACT2FN

from spiral_fast.attention import Attend
from spiral_fast.path_attention import Group, PathAttention, native_missing
from spiral_fast.supported import windowed_layer
from spiral_kernels import LogProbs, linear_logprob

ROWS = 16
HEAD_ROWS = 64


def run_decoder(decoder: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """tokens, positions (T,) -> hidden states (T, H). `attend` sees the T rows alone."""
    rows = len(tokens)
    extra = -rows % ROWS
    out = decoder(
        input_ids=pad(tokens, (0, extra))[None],
        position_ids=pad(positions, (0, extra))[None],
        use_cache=False,
        attend=_Rows(attend, rows, extra),
    )
    return out.last_hidden_state[0, :rows]


class _Rows:
    """An `Attend` for which the last `extra` rows are padding."""

    def __init__(self, attend: Attend, rows: int, extra: int):
        self.attend_rows, self.rows, self.extra = attend, rows, extra

    def attend(self, layer, query, key, value, scale):
        real = (x[:, :, : self.rows] for x in (query, key, value))
        return pad(self.attend_rows.attend(layer, *real, scale), (0, 0, 0, 0, 0, self.extra))


def log_probs(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, *, entropy: bool = False
) -> LogProbs:
    """`linear_logprob` of hidden (R, H), head (V, H), targets and temperature (R,)."""
    extra = -len(targets) % HEAD_ROWS
    hidden, targets = pad(hidden, (0, 0, 0, extra)), pad(targets, (0, extra))
    temperature = pad(temperature.to(hidden.dtype), (0, extra), value=1.0)
    parts = [
        linear_logprob(
            hidden[at : at + HEAD_ROWS],
            head,
            targets[at : at + HEAD_ROWS],
            temperature=temperature[at : at + HEAD_ROWS],
            return_entropy=entropy,
        )
        for at in range(0, len(targets), HEAD_ROWS)
    ]
    rows = len(targets) - extra
    return LogProbs(*(None if part[0] is None else torch.cat(part)[:rows] for part in zip(*parts, strict=True)))


def same_paths(attend: LearnerAttend) -> Attend:
    """PathAttention for the rows of `attend`, whose gradient it has."""
    paths: dict[int, np.ndarray] = {-1: np.empty(0, np.int64)}  # rows from the root to each node's end
    groups = []
    for node, (start, end, parent) in enumerate(attend.nodes()):
        before, rows = paths[parent], np.arange(start, end)
        paths[node] = np.concatenate([before, rows])
        groups.append(Group(paths[node], rows, len(before) + 1 + np.arange(end - start)))
    return _SamePaths(PathAttention(groups), attend)


class LearnerAttend(Attend, Protocol):
    def nodes(self) -> list[tuple[int, int, int]]:
        """(first row, end row, number of the node before it or -1): a row sees the earlier ones of its node, and those
        of the nodes before it; parents come first."""


class _SamePaths:
    def __init__(self, paths: PathAttention, attend: Attend):
        self.paths, self.inner = paths, attend

    def attend(self, layer, query, key, value, scale):
        return _Attention.apply(query, key, value, self, layer, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, same: _SamePaths, layer: int, scale: float):
        ctx.save_for_backward(query, key, value)
        ctx.rest = same, layer, scale
        query, key, value = (x.detach()[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return same.paths.attend(query, key, value, scale)[None]

    @staticmethod
    def backward(ctx, d_out):
        same, layer, scale = ctx.rest
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = same.inner.attend(layer, *inputs, scale)
        return *torch.autograd.grad(out, inputs, d_out), None, None, None


def check_possible(model: nn.Module) -> None:
    """Raises ValueError with the reason where the bits of a row of `model` would depend on the other rows."""
    weights = {weight.shape: weight for weight in model.parameters() if weight.dim() == 2}
    base = max(weights.values(), key=torch.numel)
    if base.device.type != "cpu" or base.dtype != torch.float32:
        raise ValueError(f"it needs model.dtype float32 on the CPU, the model is {base.dtype} on {base.device}")
    if (reason := native_missing()) is not None:
        raise ValueError(f"it needs the native module: {reason}")
    if (layer := windowed_layer(model.config)) is not None:
        raise ValueError(f"the model's {layer}")
    check_linear_layers(list(weights))
    check_activation(ACT2FN[model.config.hidden_act], model.config.intermediate_size)


def check_linear_layers(shapes: list[tuple[int, int]], row_counts: tuple[int, ...] = (16, 48, 208, 1040)) -> None:
    """Raises ValueError where a float32 GEMM with a weight (out, in) depends on its number of rows."""
    generator = torch.Generator().manual_seed(0)
    for n_out, n_in in shapes:
        n_out = min(n_out, 4096)
        weight, x, start = (
            torch.randn(shape, generator=generator) for shape in ((n_out, n_in), (max(row_counts), n_in), (1, n_out))
        )
        few = linear(x[:ROWS], weight), start.expand(ROWS, -1).addmm(x[:ROWS], weight.T)
        for rows in row_counts:
            many = linear(x[:rows], weight), start.expand(rows, -1).addmm(x[:rows], weight.T)
            for a, b in zip(few, many, strict=True):
                if not torch.equal(a, b[:ROWS]):
                    raise ValueError(
                        f"this machine's float32 product with a weight of shape ({n_out}, {n_in}) depends on the "
                        f"number of rows ({ROWS} or {rows}, {torch.get_num_threads()} threads); try another `threads`"
                    )


def check_activation(activation: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
    """Raises ValueError where an activation of rows of `width` depends on their number."""
    row_counts = [*range(ROWS, 1040, ROWS), *range(1040, 4096, 13 * ROWS)]
    x = torch.randn((max(row_counts), width), generator=torch.Generator().manual_seed(0))
    alone = torch.cat([activation(part) for part in x.split(ROWS)])
    for rows in row_counts:
        if not torch.equal(activation(x[:rows]), alone[:rows]):
            raise ValueError(
                f"this machine's activation of {rows} rows of {width} rounds otherwise than of {ROWS} "
                f"({torch.get_num_threads()} threads); try another `threads`"
            )
