"""The truth for `plan`: the learner itself at full size on fake CUDA tensors, its storages or its FLOPs counted.

    python tests/plan/fake_cuda.py memory|flops '[{"config": FILE, "model": {}, "checkpointing": true, "offload": false,
        "cases": [{"tokens": 20000, "sampled": 0.5}, ...]}, ...]'

prints a JSON list of its cases' figures for each group. Fake tensors have shapes, strides, dtypes and storages, but no
memory; no GPU is needed. A process of its own, since a CPU build of torch must be made to take CUDA for present.

The operators of spiral_kernels are not faked as a whole: their own host code runs, so that every workspace it allocates
is counted; only launching a Triton kernel does nothing.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from spiral_fast.config import ModelConfig
from spiral_fast.learner.cost import cost_of
from spiral_fast.learner.empty_model import empty_model
from spiral_fast.learner.packed import Packed
from spiral_fast.learner.policy import Policy, TokenLoss
from spiral_fast.learner.rows import Row
from spiral_fast.learner.sharing import paths_of
from spiral_fast.learner.trees import pack_tree
from spiral_kernels.tree_attention.levels import NO_LEVELS
from spiral_kernels.tree_attention.triton_tiles import plan_tiles

OPERATORS = torch.ops.spiral_kernels
ATTENTION = OPERATORS.tree_attention.default, OPERATORS.tree_attention_backward.default
HEAD = (OPERATORS.linear_policy_loss.default,)


@contextmanager
def cuda_taken_for_present() -> Iterator[None]:
    """Without a GPU, on a CPU or CUDA build of torch: autograd and operators may run on fake CUDA tensors."""
    if torch.cuda.is_available():
        yield
        return
    folder, kept = Path(torch.__file__).parent / "lib", []

    def answering(number: int) -> int:
        """Address of a table of functions that all return `number`: a C++ object's virtual functions."""
        function = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: number)
        table = (ctypes.c_void_p * 256)(*[ctypes.cast(function, ctypes.c_void_p).value] * 256)
        kept.extend((function, table))
        return ctypes.addressof(table)

    # torch replaces a device guard that counts no devices by one that does nothing
    registry = ctypes.CDLL(str(folder / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(registry, "_ZN3c104impl26device_guard_impl_registryE")
    no_devices = ctypes.c_void_p(answering(0))
    guards[1] = ctypes.addressof(no_devices)
    torch._C._ensureCUDADeviceGuardSet()
    # autograd asks at::getCUDAHooks().hasCUDA()
    get_hooks = ctypes.CDLL(str(folder / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(get_hooks())
    before, hooks.value = hooks.value, answering(1)
    # without a CUDA kernel, which a CPU build lacks, autograd would split this one into operators of more memory
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu_backward", lambda *_: None, "CUDA")
    try:
        yield
    finally:
        hooks.value = before
        library._destroy()


class HostCode(TorchDispatchMode):
    """Runs these operators' own code in place of their fakes, and keeps the bytes of living CUDA storages."""

    def __init__(self, operators: tuple):
        super().__init__()
        self.code = {operator: sys.modules[_module_of(operator)] for operator in operators}
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = -(-storage.nbytes() // 512) * 512  # as CUDA's caching allocator rounds
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in self.code:
            module, backward = self.code[operator], operator._schema.name.endswith("backward")
            with self:
                return (module._backward if backward else module._forward)._init_fn(*args)
        if operator is torch.ops.aten.nonzero.default:  # of the rows' weights: none is zero here
            with self:
                return torch.zeros((args[0].numel(), 1), dtype=torch.int64, device="cuda")
        out = operator(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, out)
        return out


def _module_of(operator) -> str:
    return operator._schema.name.replace("::", ".").removesuffix("_backward")


def policy_on(model: Path, settings: ModelConfig, checkpointing: bool, offload: bool) -> Policy:
    """Outside of FakeTensorMode; its parameters are on `meta` until `to_fake_cuda`."""
    policy = Policy(empty_model(settings, model))
    if checkpointing:
        policy.checkpoint_layers(offload=offload)
    return policy


def to_fake_cuda(policy: Policy) -> None:
    """Shared parameters stay shared."""
    made: dict[int, torch.Tensor] = {}
    for module in policy.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.type == "meta":
                    if id(tensor) not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    tensors[name] = made[id(tensor)]


def rows_of(case: dict) -> list[Row]:
    """About case["tokens"] distinct tokens below a prompt of 256; case["sampled"]: the share of them sampled."""
    tokens, sampled = case["tokens"], case.get("sampled", 1.0)
    n = max(1, (tokens - 256) // 3000)
    length = (tokens - 256) // n
    n_sampled = int(length * sampled)
    rows = []
    for i in range(n):
        own = [(i * 997 + j * 7) % 100_000 for j in range(length)]
        logp = np.zeros(n_sampled, np.float32)
        rows.append(Row([1] * 256 + own[: length - n_sampled], own[length - n_sampled :], logp, 1.0, 1.0, 0))
    return rows


def forward_and_backward(policy: Policy, rows: list[Row], counter: HostCode) -> tuple[Packed, int]:
    """The accumulation of one micro-batch, its inputs counted too. The micro-batch, and the peak of the forward."""
    with _disable_current_modes():
        packed = pack_tree(rows, paths_of(rows, "tree"), range(len(rows)), "cpu")
        plan = packed.attend.plan
        tiles = plan_tiles(*plan[:4])
    for name in ("tokens", "positions", "targets", "row_index"):
        setattr(packed, name, torch.empty_like(getattr(packed, name), device="cuda"))
    packed.attend.plan = plan._replace(  # as TreePlan.of makes it on CUDA
        visible_until=torch.empty_like(plan.visible_until, device="cuda"),
        tiles=tuple(torch.empty_like(tile, device="cuda") for tile in tiles),
        levels=NO_LEVELS,
    )
    n = packed.targets.numel()
    credit, weight = (torch.empty(n, dtype=torch.float64, device="cuda") for _ in range(2))
    loss = TokenLoss(credit, torch.empty(n, device="cuda"), weight)
    out = policy(packed, 1.0, loss)
    after_forward = counter.peak
    out.loss.backward()
    return packed, after_forward


def memory(policy: Policy, case: dict) -> dict:
    """Peak bytes of a forward, and of it and its backward, without gradients before it."""
    for parameter in policy.parameters():
        parameter.grad = None
    with HostCode((*ATTENTION, *HEAD)) as counter:
        for parameter in policy.parameters():
            counter.add(parameter)
        packed, forward = forward_and_backward(policy, rows_of(case), counter)
    return {"tokens": packed.tokens.numel(), "rows": len(packed.targets), "forward": forward, "peak": counter.peak}


def flops(policy: Policy, case: dict) -> dict:
    """By torch's counter, and by learner/cost.py. Attention: 4 FLOPs forward and 8 backward for each number of a head
    and each key that a query sees, counted key by key."""
    cost = cost_of(policy.model)
    config = policy.model.get_base_model().config
    pairs = 0

    def of_attention(factor: int):
        return lambda *shapes, **_: factor * pairs * config.num_attention_heads * config.head_dim

    formulas = {
        OPERATORS.tree_attention: of_attention(4),
        OPERATORS.tree_attention_backward: of_attention(8),
        torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],  # torch knows addmm alone
    }
    rows = rows_of(case)
    with _disable_current_modes():
        packed = pack_tree(rows, paths_of(rows, "tree"), range(len(rows)), "cpu")
        until = packed.attend.plan.visible_until
        pairs = int((until - torch.arange(len(until))).sum())
        counted = cost.of_packed(packed)
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter, HostCode(HEAD) as storages:
        forward_and_backward(policy, rows, storages)
    return {"torch": counter.get_total_flops(), "cost": counted}


@contextmanager
def fake_cuda() -> Iterator[None]:
    launches = patch.object(triton.runtime.jit.KernelInterface, "__getitem__", lambda *_: lambda *a, **k: None)
    device = patch.object(torch.cuda, "device_of", lambda _: nullcontext())
    with cuda_taken_for_present(), FakeTensorMode(allow_non_fake_inputs=True), launches, device:
        yield


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    measure = {"memory": memory, "flops": flops}[sys.argv[1]]
    for group in json.loads(sys.argv[2]):
        settings = ModelConfig(path="-", **group["model"])
        made = policy_on(Path(group["config"]), settings, group["checkpointing"], group["offload"])
        with fake_cuda():
            to_fake_cuda(made)
            print(json.dumps([measure(made, case) for case in group["cases"]]), flush=True)
