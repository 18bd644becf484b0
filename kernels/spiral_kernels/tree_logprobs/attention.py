"""tree_attention as an attention implementation of transformers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from spiral_kernels.tree_attention import TreePlan, tree_attention

PREFIX = "spiral_tree_over_"
NOT_CAUSAL_SOFTMAX = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias")  # what a layer may ask for


@dataclass
class Tree:
    """What a forward of the decoder passes down to its layers."""

    plan: TreePlan
    layers: list[int] = field(default_factory=list)  # that attended over it, in their order


def install(model) -> None:
    """Put `model` (a transformers one) on an implementation that attends over a tree when the decoder is called with
    spiral_tree=Tree(plan), and as it did before when not. It stays: activation checkpointing calls layers again in the
    backward.

    Raises ValueError for a model that does not attend through AttentionInterface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before = model.config._attn_implementation
    if before.startswith(PREFIX):
        return
    if not model.is_backend_compatible():
        raise ValueError(
            f"tree_logprobs: {type(model).__name__} does not attend through transformers' AttentionInterface"
        )
    name, registered = PREFIX + before, AttentionInterface()

    def attention(module, query, key, value, attention_mask, scaling=None, spiral_tree: Tree | None = None, **asked):
        if spiral_tree is None:
            if before in registered:
                attend = registered[before]
            else:  # "eager": each model's file has its own
                attend = sys.modules[type(module).__module__].eager_attention_forward
            return attend(module, query, key, value, attention_mask, scaling=scaling, **asked)
        for option in NOT_CAUSAL_SOFTMAX:
            if asked.get(option) is not None:
                raise ValueError(
                    f"tree_logprobs: layer {module.layer_idx} has {option} = {asked[option]!r}; only full causal "
                    "attention is computed on trees"
                )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (1, H, T, D) -> (T, H, D)
        spiral_tree.layers.append(module.layer_idx)
        return tree_attention(q, k, v, spiral_tree.plan, scale=scaling).unsqueeze(0), None

    AttentionInterface.register(name, attention)
    masks = AttentionMaskInterface()
    if before in masks:
        AttentionMaskInterface.register(name, masks[before])
    model.set_attn_implementation(name)


def no_mask(like: torch.Tensor) -> torch.Tensor:
    """A mask that transformers passes on as prepared, so that it makes none of its own (T x T)."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=like.device)
