"""MurmurHash3 (x86, 32 bits, seed 0) of four words: the 64 bits of a seed, a position, a column. With it SGLang draws a
request's random numbers from its seed."""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF


def times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """The low 32 bits of the product, within 63."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + ((x * high & 0xFFFF) << 16)) & WORD


def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits | x >> 32 - bits) & WORD


def with_word(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = times(rotated(times(word & WORD, 0xCC9E2D51), 15), 0x1B873593)
    return (times(rotated(state ^ word, 13), 5) + 0xE6546B64) & WORD


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """seed, positions (B,), columns (V,) integers -> (B, V) uint32."""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros((len(seed), 1), dtype=torch.int64)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        state = with_word(state, word[:, None])
    state = with_word(state, columns.to(torch.int64)[None]) ^ 16  # bytes
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = times(state ^ state >> bits, factor)
    return (state ^ state >> 16).to(torch.uint32)
