"""Poly-EPO: search traces trained for the polychromic score of the sets they are in; nothing is aggregated.

    f(G) = mean_i r(y_i) * d(G)      over the n search traces of the set G; d = diversity, see `diversity.py`
    A(y_i) = mean over the sets G with y_i of f(G) - mean f;  0 if no set has it

The objective is the polychromic one of arXiv 2509.25424, the credit the marginal set advantage of Poly-EPO, arXiv
2604.17654: mean score of the sets with y_i minus mean score of all sets, with N1 = 8, n = 4 and all K = 70 sets. We
know both from their abstracts, the authors' page jubayer-hamid.github.io/set_rl_visualizations and reimplementations
by others, which agree on the two lines above. Not verified: the papers' own equations, any further normalisation, their
clipping. They take as diversity the clusters of reasoning strategies that a language model finds; the default here
counts answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from numbers import Rational

import numpy as np

from spiral_fast.credit.spiral import spiral_credits


def poly_epo_credits(rewards: np.ndarray, sets: np.ndarray, diversity: Sequence[Rational | float]) -> np.ndarray:
    """rewards (N1,) float64 of the search traces, sets (K, n) int64, diversity d(G) of each set -> credits (N1,).

    E[update] = M grad E f(G), M of `sets.multiplicity`. A credit that is zero in exact arithmetic is 0.0: where
    rewards are integers and every d is rational, scores are carried as integers over the common denominator of f;
    else a credit is zero within 1e-9 max|f|.
    """
    exact = all(isinstance(d, Rational) for d in diversity)
    common = lcm(*(Fraction(d).denominator for d in diversity)) if exact else 1
    if common > 2**53:  # no float64 holds the integers
        common = 1
    scaled = np.array([float(d * common) for d in diversity])  # (K,)
    scores = rewards[sets].sum(axis=1) * scaled  # (K,), n * common * f(G)
    search, _ = spiral_credits(scores[:, None], sets, len(rewards))  # the set credit of SPIRAL, one score per set
    return search / (sets.shape[1] * common)
