"""What other projects build on: the public names of spiral_kernels, their parameters, and what importing them needs."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest

import spiral_kernels
from spiral_kernels.integrations import trl, verl

HEAD = "bias=None, soft_cap=None, temperature=1.0"
GATE = "*, search_length=None, aggregation_length=None, search_target=None, aggregation_target=None"
RATIOS = "clip=None, dual_clip=None, tis_cap=None"

SIGNATURES = {
    "available_backends": "(operation, device='cpu', dtype=torch.float32)",
    "flat_set_advantages": "(rewards, reward_offsets, members, member_offsets, trace_offsets, set_offsets, "
    + GATE
    + ")",
    "force_backend": "(name, operation=None)",
    "linear_logprob": f"(hidden, weight, targets, *, row_index=None, {HEAD}, return_entropy=False)",
    "linear_policy_loss": "(hidden, weight, targets, advantages, rollout_logp, token_weight, *, row_index=None, "
    "old_logp=None, ref_logp=None, kl_coef=0.0, kl='k3', loss='importance_sampling', "
    f"{RATIOS}, token_mask=None, {HEAD}, entropy_coef=0.0)",
    "policy_loss": "(logp, rollout_logp, advantages, cu_seqlens, *, old_logp=None, ref_logp=None, token_weight=None, "
    f"loss='importance_sampling', {RATIOS}, token_mask=None, sequence_mask=None, off_policy_mask=None, kl_coef=0.0, "
    "kl='k3')",
    "set_advantages": f"(rewards, sets, n_search, {GATE})",
    "token_weights": "(reduction, cu_seqlens, mask=None, *, n_problems=None, n_sequences=None, max_length=None)",
    "tree_attention": "(q, k, v, tree, *, scale=None)",
    "tree_logprobs": "(model, segments, *, live=None, temperature=1.0, return_entropy=False)",
}
FIELDS = {
    "LinearPolicyLoss": "loss logp entropy ratio_mean ratio_max clip_low clip_high kl",
    "LogProbs": "logp entropy lse",
    "PolicyLoss": "loss ratio_mean ratio_max clip_low clip_high masked kl",
    "PrefixTree": "tokens positions start end parent subtree_end edge_row edge_target edge_trace edge_position "
    "trace_rows trace_offsets",
    "SetAdvantages": "search aggregation set appearances",
    "TreePlan": "start end parent subtree_end visible_until tiles levels",
}


def parameters(function) -> str:
    """Its signature without types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_names():
    assert spiral_kernels.__all__ == sorted(spiral_kernels.__all__)
    assert set(spiral_kernels.__all__) == SIGNATURES.keys() | FIELDS.keys() | {"BackendError"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters(name):
    assert parameters(getattr(spiral_kernels, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    assert " ".join(getattr(spiral_kernels, name)._fields) == FIELDS[name]


def test_constructors():
    assert parameters(spiral_kernels.PrefixTree.from_segments) == "(segments, *, live=None, min_shared_run=1)"
    flat = "(tokens, offsets, sampled, *, live=None, min_shared_run=1)"
    assert parameters(spiral_kernels.PrefixTree.build) == flat
    assert parameters(spiral_kernels.TreePlan.of) == "(tree, device='cpu')"
    assert issubclass(spiral_kernels.BackendError, RuntimeError)


def test_integrations():
    assert parameters(trl.use_linear_logprob) == "(trainer)"
    assert parameters(verl.use_linear_logprob) == "()"
    assert parameters(verl.linear_for_ppo) == "(hidden_states, vocab_weights, input_ids, temperature=1.0)"


NEEDED = {"torch", "numpy", "numba"}
# Where CUDA, the other trainer or the model is, and then only when a function of ours is called.
INSIDE_FUNCTIONS = {"triton", "flash_attn", "transformers", "trl", "verl"}
SOURCES = sorted(Path(spiral_kernels.__file__).parent.rglob("*.py"))


def imported(tree: ast.AST):
    """(package, is it at the top of the module) of every import of another package."""
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [node.module]
        yield from ((name.partition(".")[0], id(node) in top) for name in names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_needs_torch_numpy_and_numba_only(path):
    is_triton = path.name.startswith("triton")  # imported for CUDA tensors only: see test_import_is_light
    for package, at_top in imported(ast.parse(path.read_text())):
        allowed = NEEDED | ({"triton"} if is_triton else set()) | (set() if at_top else INSIDE_FUNCTIONS)
        assert package in allowed | sys.stdlib_module_names | {"spiral_kernels"}, f"{path}: import {package}"
