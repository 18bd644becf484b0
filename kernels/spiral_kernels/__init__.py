"""Kernels for reinforcement learning of language models; needs torch, numpy and numba only."""

from __future__ import annotations

import torch  # noqa: F401  first: its OpenMP runtime is the one the native module shares

from spiral_kernels.dispatch import BackendError, available_backends, force_backend
from spiral_kernels.linear_logprob import LogProbs, linear_logprob
from spiral_kernels.linear_policy_loss import LinearPolicyLoss, linear_policy_loss
from spiral_kernels.policy_loss import PolicyLoss, policy_loss, token_weights
from spiral_kernels.prefix_tree import PrefixTree
from spiral_kernels.set_advantages import SetAdvantages, flat_set_advantages, set_advantages
from spiral_kernels.tree_attention import TreePlan, tree_attention
from spiral_kernels.tree_logprobs import tree_logprobs

__all__ = [
    "BackendError",
    "LinearPolicyLoss",
    "LogProbs",
    "PolicyLoss",
    "PrefixTree",
    "SetAdvantages",
    "TreePlan",
    "available_backends",
    "flat_set_advantages",
    "force_backend",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "set_advantages",
    "token_weights",
    "tree_attention",
    "tree_logprobs",
]
