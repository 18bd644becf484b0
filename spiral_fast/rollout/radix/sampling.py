"""Sampling by inverting the softmax's CDF: one uniform number per token, a function of (seed, token index) alone."""

from __future__ import annotations

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256  # tokens of a large vocabulary that are summed together first


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: np.ndarray, index: np.ndarray) -> np.ndarray:
    """seeds (R,) uint64, index (R,) uint64 token indices -> (R,) float64 in [0, 1), multiples of 2^-52.

    Output `index` of the SplitMix64 stream that starts at the mixed seed: no state that neighbours could disturb.
    """
    return (_mix(_mix(seeds) + (index + np.uint64(1)) * _GAMMA) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(logits: torch.Tensor, temperature: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature).

    logits (R, V), any float type; temperature (R,); u (R,) float64 in [0, 1). Returns tokens (R,) int64 and their
    log-probs (R,) float32, NaN in a row whose logits are not finite (but -inf, probability 0, is). Arithmetic in
    float32 (float64 for float64 logits), cumulative sums in float64.
    """
    rows, vocabulary = logits.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits.to(dtype) / temperature.to(dtype)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    if vocabulary <= 4 * _BLOCK:
        weight = scaled.exp()
        total = weight.sum(-1)
        tokens, _ = _invert(weight, u)
    else:  # first which block, then which token inside it: two short cumulative sums instead of a long one
        blocks = -(-vocabulary // _BLOCK)
        weight = scaled.new_empty((rows, blocks * _BLOCK))
        torch.exp(scaled, out=weight[:, :vocabulary])
        weight[:, vocabulary:] = 0
        weight = weight.view(rows, blocks, _BLOCK)
        mass = weight.sum(-1)
        total = mass.sum(-1)
        block, within = _invert(mass, u)
        inside, _ = _invert(weight.gather(1, block[:, None, None].expand(rows, 1, _BLOCK)).squeeze(1), within)
        tokens = block * _BLOCK + inside
    return tokens, (scaled.gather(1, tokens[:, None]).squeeze(1) - total.log()).float()


def _invert(weight: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (R, n) >= 0: first index whose cumulative weight exceeds u * total; where u falls in it, in [0, 1)."""
    cumulative = weight.cumsum(-1, dtype=torch.float64)
    target = (u * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weight.shape[1] - 1)  # beyond it if NaN
    own = weight.gather(1, index).double()
    position = ((target - cumulative.gather(1, index)) / own).add_(1).clamp_(0, 1 - 2.0**-52)
    return index.squeeze(1), position.squeeze(1)
