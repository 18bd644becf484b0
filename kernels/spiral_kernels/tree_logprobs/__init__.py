"""Log-probs of a batch of traces under a transformers model, every distinct prefix token computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spiral_kernels.linear_logprob import LogProbs, linear_logprob
from spiral_kernels.prefix_tree import PrefixTree
from spiral_kernels.tree_attention import TreePlan
from spiral_kernels.tree_logprobs.attention import Tree, install, no_mask

__all__ = ["tree_logprobs"]

# Traces share what follows a branch only if they agree on that many tokens there: chance agreements, such as the first
# words of all samples after a prompt, would become many short nodes.
MIN_SHARED_RUN = 16


def tree_logprobs(
    model: torch.nn.Module,
    segments: Sequence[Sequence[Sequence[int] | Tensor]],
    *,
    live: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
) -> LogProbs:
    """log softmax(logits / temperature)[token] of every sampled token, with gradient: what a padded forward of each
    trace gives, from a forward and backward in which a prefix common to several traces is run once.

    model: a causal language model of transformers, plain or in peft, whose layers all attend causally to everything
    (Llama, Qwen2, Qwen3, ...) and whose head is linear. It is left on an attention implementation that does what the
    one before did in every other call. Dropout must be off.

    segments: a trace is [prompt, sampled] or [prompt, sampled, tool output, sampled, ...], token ids as for
    `PrefixTree.from_segments`; a GRPO group is [[prompt, sample] for sample in samples]. The R results are those of the
    sampled tokens, trace after trace: logp.split(lengths).

    live (R,) bool: tokens whose log-prob is wanted (advantage != 0). What no live token comes after is not computed;
    the results of the others are 0.

    Returns LogProbs(logp (R,), entropy (R,) | None, lse (R,)), as `linear_logprob`. Raises ValueError with one line for
    what cannot be computed exactly.
    """
    causal_lm = model.get_base_model() if hasattr(model, "peft_config") else model
    if not hasattr(causal_lm, "get_decoder"):
        raise ValueError(f"tree_logprobs: {type(causal_lm).__name__} is no causal language model of transformers")
    decoder, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    _check(model, causal_lm, head)
    n_rows = sum(len(segment) for trace in segments for segment in trace[1::2])
    wanted = torch.ones(n_rows, dtype=torch.bool) if live is None else live.cpu()
    tree = PrefixTree.from_segments(segments, live=wanted, min_shared_run=MIN_SHARED_RUN)
    if not wanted.any():
        empty = head.weight.new_zeros(n_rows, dtype=torch.float32)
        return LogProbs(empty, empty if return_entropy else None, empty)
    install(causal_lm)
    device = causal_lm.get_input_embeddings().weight.device
    call = Tree(TreePlan.of(tree, device))
    tokens, positions = (x.unsqueeze(0).to(device) for x in (tree.tokens, tree.positions))
    hidden = decoder(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=no_mask(tokens),
        use_cache=False,
        spiral_tree=call,
    ).last_hidden_state[0]
    if call.layers != list(range(causal_lm.config.num_hidden_layers)):
        raise ValueError(f"tree_logprobs: {type(causal_lm).__name__}: only layers {call.layers} attended over the tree")
    found = linear_logprob(
        hidden,
        head.weight,
        tree.edge_target[wanted].to(device),
        row_index=tree.edge_row[wanted].to(device),
        temperature=temperature[wanted.to(temperature.device)] if isinstance(temperature, Tensor) else temperature,
        return_entropy=return_entropy,
        bias=head.bias,
        soft_cap=getattr(causal_lm.config, "final_logit_softcapping", None),
    )
    if wanted.all():
        return found
    rows = wanted.nonzero()[:, 0].to(device)
    return LogProbs(*(x if x is None else x.new_zeros(n_rows).index_put((rows,), x) for x in found))


def _check(model, causal_lm, head) -> None:
    def need(good: bool, message: str) -> None:
        if not good:
            raise ValueError(f"tree_logprobs: {type(causal_lm).__name__} {message}")

    need(type(head) is torch.nn.Linear, f"has a {type(head).__name__} for a head; only a plain linear one is computed")
    for name, module in model.named_modules():
        active = isinstance(module, torch.nn.Dropout) and module.p > 0 and module.training
        need(not active, f"has dropout {module.p if active else 0} in {name}: model.eval(), or set it to 0")
    config = causal_lm.config
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        need(kind == "full_attention", f"has {kind} in layer {layer}; only full causal attention is computed on trees")
    for field in ("attn_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(config, field, None)
        need(value in (None, 1), f"has {field} = {value}; it is not computed")
