"""Attention as PrefixGrouper computes it (https://github.com/johncaged/PrefixGrouper): rows with one prompt share it;
its tokens attend causally, then the samples' tokens, padded to a rectangle, to the repeated prompt and their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from spiral_fast.learner.rows import Row


class ConcatAttention:
    """An `Attend` over the rows of trees of depth 2: a prompt, then the samples' own tokens."""

    def __init__(self, rows: Sequence[Row]):
        self.groups: list[tuple[int, list[int]]] = []  # tokens of the prompt, of each sample
        for _, group in groupby(rows, key=lambda row: row.prompt):
            group = list(group)
            self.groups.append((len(group[0].prompt), [len(row.tokens) - 1 for row in group]))
        self.masks = [self._mask(*group) for group in self.groups]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (1, Hq, T, D), key and value (1, Hkv, T, D); returns (1, T, Hq, D)."""
        options = dict(scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        out, start = [], 0
        for (prompt, own), mask in zip(self.groups, self.masks, strict=True):
            end = start + prompt
            q, k, v = (x[:, :, start:end] for x in (query, key, value))
            out.append(scaled_dot_product_attention(q, k, v, is_causal=True, **options)[0].transpose(0, 1))
            longest, begin = max(own), end
            end += sum(own)
            if longest:
                own_q, own_k, own_v = (_rectangle(x[0, :, begin:end], own, longest) for x in (query, key, value))
                k, v = (torch.cat([x.expand(len(own), -1, -1, -1), y], 2) for x, y in ((k, own_k), (v, own_v)))
                found = scaled_dot_product_attention(own_q, k, v, attn_mask=mask, **options)
                out += [rows[:, :n].transpose(0, 1) for rows, n in zip(found, own, strict=True)]
            start = end
        return torch.cat(out).unsqueeze(0)

    def _mask(self, prompt: int, own: list[int]) -> Tensor:
        """(samples, 1, longest, prompt + longest) True where a query sees a key."""
        longest = max(own)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        return torch.cat([torch.ones(longest, prompt, dtype=torch.bool), causal], 1).expand(len(own), 1, -1, -1)


def _rectangle(x: Tensor, lengths: list[int], longest: int) -> Tensor:
    """(H, sum of lengths, D) -> (samples, H, longest, D), zeros behind each."""
    return torch.stack([pad(part, (0, 0, 0, longest - part.shape[1])) for part in x.split(lengths, 1)])
