"""Sampling: one uniform number per token, a function of (seed, token index) alone; the token by inverting the softmax's CDF."""

from __future__ import annotations

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256  # tokens of the vocabulary summed together in the first of two levels


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: np.ndarray, index: np.ndarray) -> np.ndarray:
    """seeds (R,) uint64, index (R,) uint64 token indices -> (R,) float64 in [0, 1), multiples of 2^-52.

    Output `index` of the SplitMix64 stream that starts at the mixed seed: needs no state, so neighbours cannot disturb it.
    """
    return (_mix(_mix(seeds) + (index + np.uint64(1)) * _GAMMA) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(logits: torch.Tensor, temperature: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature).

    logits (R, V), any float type; temperature (R,); u (R,) float64 in [0, 1). Returns tokens (R,) int64 and their log-probs
    (R,) float32. Arithmetic in float32 (float64 for float64 logits); cumulative sums in float64. A token of probability 0 is
    never drawn.
    """
    rows, vocabulary = logits.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits.to(dtype) / temperature.to(dtype)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    block = _BLOCK if vocabulary > 4 * _BLOCK else vocabulary
    blocks = -(-vocabulary // block)
    weight = scaled.new_empty((rows, blocks * block))
    torch.exp(scaled, out=weight[:, :vocabulary])
    weight[:, vocabulary:] = 0
    weight = weight.view(rows, blocks, block)
    # First which block, then which token inside it: two short sums instead of one over the whole vocabulary.
    mass = weight.sum(-1) if blocks > 1 else weight.new_ones((rows, 1))
    chosen, within = _invert(mass, u)
    weight = weight.gather(1, chosen[:, None, None].expand(rows, 1, block)).squeeze(1)
    inside, _ = _invert(weight, within)
    tokens = chosen * block + inside
    total = mass.sum(-1) if blocks > 1 else weight.sum(-1)
    return tokens, (scaled.gather(1, tokens[:, None]).squeeze(1) - total.log()).float()


def _invert(weight: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (R, n) >= 0: the first index whose cumulative weight exceeds u * total, and the position inside it in [0, 1)."""
    cumulative = weight.cumsum(-1, dtype=torch.float64)
    target = (u * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True)
    upper = cumulative.gather(1, index)
    own = weight.gather(1, index).double()
    position = ((target - (upper - own)) / own).clamp_(0, 1 - 2.0**-52)
    return index.squeeze(1), position.squeeze(1)
