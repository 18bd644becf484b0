"""The stand-in sgl_kernel computes one thing itself: a hash, whose truth is its definition, byte by byte."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path

import pytest
import torch

WORD = 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32, seed 0, of whole words."""

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & WORD

    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        state ^= rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (rotated(state, 13) * 5 + 0xE6546B64) & WORD
    state ^= len(data)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> bits) * factor & WORD
    return state ^ state >> 16


def test_known_value():
    assert murmur3(b"") == 0 and murmur3(b"\x21\x43\x65\x87") == 0xF55B516B


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_hash(dtype):
    file = Path(__file__).parent / "support" / "sgl_kernel" / "hashing.py"  # alone: the package is for SGLang's process
    murmur_hash32 = runpy.run_path(str(file))["murmur_hash32"]
    seeds, positions, columns = [0, 1, 2**31, 2**63 - 1, 0x123456789ABCDEF], [0, 7, 2**31 - 1, 5, 1], [0, 1, 151935]
    found = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).view(dtype), torch.tensor(positions), torch.tensor(columns)
    )
    assert found.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        assert found[row].to(torch.int64).tolist() == expected
