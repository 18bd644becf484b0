"""What holds for every operator that spiral_kernels registers, now and later: opcheck, torch.compile, no_grad.

Each public operation is called once on small tensors; the operators it reaches, forward and backward, are recorded with
their arguments. An operator of the namespace that no call reaches fails the first test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import spiral_kernels as sk

NAMESPACE = "spiral_kernels::"
TOKENS, HIDDEN, VOCABULARY = 10, 6, 17


class Case(NamedTuple):
    inputs: tuple[Tensor, ...]  # those with a gradient, if the operation has one
    run: Callable[..., Tensor]  # of the inputs; what a trainer would call backward on, a number a row


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def differentiable(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))


CU_SEQLENS = torch.tensor([0, 4, 4, TOKENS])
TARGETS = torch.arange(TOKENS) % VOCABULARY
ROWS = torch.arange(TOKENS) // 2
FROZEN = random(VOCABULARY, HIDDEN, seed=4)
ROLLOUT = random(TOKENS, seed=5)
WEIGHTS = sk.token_weights("sequence_mean", CU_SEQLENS)
PLAN = sk.TreePlan.of(sk.PrefixTree.from_segments([[[1, 2], [3, 4, 5]], [[1, 2], [3, 6]], [[7], [8, 9]]]))
T = len(PLAN.visible_until)

CASES = {
    "linear_logprob": Case(
        differentiable((TOKENS, HIDDEN), (VOCABULARY, HIDDEN)),
        lambda hidden, weight: sk.linear_logprob(hidden, weight, TARGETS, row_index=ROWS, return_entropy=True).logp,
    ),
    "linear_logprob, frozen head": Case(
        differentiable((TOKENS, HIDDEN)),
        lambda hidden: sk.linear_logprob(hidden, FROZEN, TARGETS, bias=FROZEN[:, 0], soft_cap=3.0).logp,
    ),
    "linear_policy_loss": Case(
        differentiable((TOKENS, HIDDEN), (VOCABULARY, HIDDEN)),
        lambda hidden, weight: (
            sk.linear_policy_loss(
                hidden, weight, TARGETS, ROLLOUT, ROLLOUT, WEIGHTS, old_logp=ROLLOUT, tis_cap=2.0, entropy_coef=0.1
            ).loss
        ),
    ),
    "linear_policy_loss, frozen head": Case(
        differentiable((TOKENS, HIDDEN)),
        lambda hidden: sk.linear_policy_loss(hidden, FROZEN, TARGETS, ROLLOUT, ROLLOUT, WEIGHTS, row_index=ROWS).loss,
    ),
    "policy_loss": Case(
        differentiable((TOKENS,)),
        lambda logp: (
            sk.policy_loss(
                logp, ROLLOUT, random(3, seed=6), CU_SEQLENS, token_weight=WEIGHTS, loss="gspo", clip=(0.2, 0.3)
            ).loss
        ),
    ),
    "set_advantages": Case(
        (),
        lambda: (
            sk.set_advantages(
                (random(2, 3, 2, seed=7) > 0).float(), torch.tensor([[[0, 1], [1, 2], [0, 3]]] * 2), 4
            ).search
        ),
    ),
    "tree_attention": Case(
        differentiable((T, 4, 8), (T, 2, 8), (T, 2, 8)), lambda q, k, v: sk.tree_attention(q, k, v, PLAN)
    ),
}


class Recorder(TorchDispatchMode):
    """Calls of our operators: the operator, its arguments, its results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert not (keywords and function.name().startswith(NAMESPACE))
        results = function(*arguments, **(keywords or {}))
        if function.name().startswith(NAMESPACE):
            self.calls.append((function, arguments, tree_leaves(results)))
        return results


def recorded(case: Case, *, train: bool) -> list:
    with Recorder() as recorder, torch.set_grad_enabled(train):
        result = case.run(*case.inputs)
        assert result.requires_grad == (train and bool(case.inputs))
        if result.requires_grad:
            torch.autograd.grad(result.sum(), case.inputs)
    return recorder.calls


CALLS = [call for case in CASES.values() for call in recorded(case, train=True)]
REGISTERED = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE))


def test_every_registered_operator_is_reached():
    assert sorted({function.name() for function, *_ in CALLS}) == REGISTERED


def fresh(arguments, inputs):
    """Copies; those of the operation's inputs require a gradient again."""
    memory = {x.data_ptr(): x for x in inputs}

    def copy(x):
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone().requires_grad_(x.data_ptr() in memory and x.shape == memory[x.data_ptr()].shape)

    return tree_map(copy, arguments)


@pytest.fixture(params=range(len(CALLS)), ids=[f.name().removeprefix(NAMESPACE) for f, *_ in CALLS])
def call(request):
    function, arguments, _ = CALLS[request.param]
    inputs = () if function.name().endswith("_backward") else [x for case in CASES.values() for x in case.inputs]
    return function, fresh(arguments, inputs)


def test_opcheck(call):
    torch.library.opcheck(*call)


def test_compiled(call):
    """In one graph: the same results and gradients, bit for bit."""
    function, arguments = call

    def values_and_gradients(run):
        results = tree_leaves(run(*arguments))
        inputs = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
        total = sum((x.sum() for x in results if x.requires_grad), torch.zeros(()))
        return results, torch.autograd.grad(total, inputs) if inputs else ()

    compiled = torch.compile(lambda *arguments: function(*arguments), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(values_and_gradients(compiled), values_and_gradients(function), rtol=0, atol=0)
    torch.compiler.reset()  # or its cache keeps tensors with their graphs


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.inputs])
def test_public_function_compiled(name):
    """With a graph break or two where an operation looks at its arguments."""
    case = CASES[name]

    def value_and_gradients(run):
        result = run(*case.inputs)
        return result, torch.autograd.grad(result.sum(), case.inputs)

    compiled = torch.compile(case.run, backend="aot_eager")
    torch.testing.assert_close(value_and_gradients(compiled), value_and_gradients(case.run), rtol=0, atol=0)
    torch.compiler.reset()


def formed(calls) -> int:
    """Numbers that our operators returned."""
    return sum(x.numel() for *_, results in calls for x in results)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.inputs])
def test_no_gradient_is_formed_under_no_grad(name):
    case = CASES[name]
    less = formed(recorded(case, train=True)) - formed(recorded(case, train=False))
    assert less >= sum(x.numel() for x in case.inputs)
