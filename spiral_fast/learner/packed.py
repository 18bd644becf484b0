"""Packed forward: documents laid end to end without padding, each attending to itself alone.

Shape legend: T tokens of one packed batch, N documents, L tokens of one document, Hq query heads, Hkv key/value heads,
D head size, R sampled tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch.nn.functional import scaled_dot_product_attention

from spiral_fast.attention import Attend

try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else None
except ImportError:  # a torch built without it
    varlen_attn = None


class DocumentAttention:
    """Causal attention inside each document, sliding windows included (an `Attend` of spiral_fast/attention.py).

    Neighbours of equal length are stacked into one call: sort documents by length to make it few calls.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str):
        self.runs = [(length, len(list(run))) for length, run in groupby(lengths)]  # (L, how many in a row)
        self.longest = max(lengths)
        self.flash = torch.device(device).type == "cuda" and varlen_attn is not None
        if self.flash:
            self.offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)  # (N + 1,)

    def nodes(self) -> list[tuple[int, int, int]]:
        """See spiral_fast/batch_invariant.py: every document is one."""
        ends = list(accumulate(length for length, count in self.runs for _ in range(count)))
        return [(start, end, -1) for start, end in zip([0, *ends], ends, strict=False)]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """query (1, Hq, T, D), key and value (1, Hkv, T, D); returns (1, T, Hq, D)."""
        if self.flash and query.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(query, key, value, scale, window)
        out, start = [], 0
        for length, count in self.runs:
            end = start + length * count
            # (1, H, count * L, D) -> (count, H, L, D) without a copy: tokens are the slow axis in memory
            q, k, v = (x[0, :, start:end].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value))
            mask = {"is_causal": True}
            if window is not None and window < length:
                mask = {"attn_mask": _band(length, window, query.device)}
            o = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **mask)
            out.append(o.transpose(1, 2).flatten(0, 1))  # (count * L, Hq, D)
            start = end
        return torch.cat(out).unsqueeze(0) if len(out) > 1 else out[0].unsqueeze(0)

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        options = {}
        if q.shape[1] != k.shape[1]:
            if _VARLEN_GQA:
                options = _VARLEN_GQA
            else:
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        longest, offsets = self.longest, self.offsets
        before = -1 if window is None else window - 1  # tokens seen before a token itself
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, window_size=(before, 0), **options)
        return out.unsqueeze(0)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(L, L) bool: token q sees k where q - window < k <= q."""
    return torch.ones((length, length), dtype=torch.bool, device=device).tril_().triu_(1 - window)


@dataclass
class Packed:
    """Documents prompt + sampled tokens, packed. A document's last token predicts nothing and is left out."""

    tokens: torch.Tensor  # (1, T) int64
    positions: torch.Tensor  # (1, T) int64: how many tokens come before it in its document
    attend: Attend
    targets: torch.Tensor  # (R,) int64 sampled tokens, document after document
    row_index: torch.Tensor  # (R,) int64: the token of the packed batch whose hidden state predicts targets[r]
    counts: list[int]  # (N,) sampled tokens of each document; R = sum(counts)
    role: str | None = None  # the adapter of all its documents (learner/roles.py); None: the one that is active


def pack(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device | str = "cpu",
    role: str | None = None,
) -> Packed:
    """Pack (prompt, sampled tokens) pairs, in this order; both non-empty."""
    tokens: list[int] = []
    targets: list[int] = []
    positions, row_index, lengths = [], [], []
    for prompt, sampled in documents:
        start, length = len(tokens), len(prompt) + len(sampled) - 1
        tokens.extend(prompt)
        tokens.extend(sampled[:-1])
        targets.extend(sampled)
        positions.append(torch.arange(length))
        row_index.append(torch.arange(start + len(prompt) - 1, start + length))
        lengths.append(length)
    return Packed(
        tokens=torch.tensor([tokens], device=device),
        positions=torch.cat(positions).unsqueeze(0).to(device),
        attend=DocumentAttention(lengths, device),
        targets=torch.tensor(targets, device=device),
        row_index=torch.cat(row_index).to(device),
        counts=[len(sampled) for _, sampled in documents],
        role=role,
    )
