"""FSDP2: the frozen base, held in shards by all ranks.

The trained parameters are left out: they stay whole plain tensors on every rank, so that optimiser, checkpoint and
engine read them as they do without FSDP, and their gradients are added up once a step instead of once a micro-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spiral_fast.learner.packed import pack
from spiral_fast.learner.policy import Policy


def shard(policy: Policy, device: torch.device, *, offload_base: bool = False) -> None:
    """Shard the frozen parameters of each decoder layer, then the rest (embedding, norm, head; a tied head with its
    embedding) in the root group, in place, over all ranks: those of torchrun, else this process alone.

    The base may still be on the CPU: each group goes to `device` when its turn comes, and its shard stays there, or on
    the host with `offload_base` (pinned memory with CUDA), from where it is streamed for each forward and backward. A
    base on `meta` stays there: fill its shards (learner/streamed.py), then call `settle`.
    The adapter must be on already; it goes to `device` and is not sharded.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    trained = {parameter for parameter in policy.parameters() if parameter.requires_grad}
    for parameter in trained:
        parameter.data = parameter.data.to(device)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload_base else OffloadPolicy()
    options = dict(
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)), ignored_params=trained, offload_policy=offload
    )
    for layer in policy.layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    if not any(parameter.is_meta for parameter in policy.parameters()):
        settle(policy, device)


def settle(policy: Policy, device: torch.device) -> None:
    """FSDP takes the module of the first forward for its root, and the engine, which calls the layers, may be first."""
    with torch.no_grad():
        policy(pack([([0], [0])], device), 1.0)
    policy.reshard()


@contextmanager
def root_unsharded(policy: Policy) -> Iterator[None]:
    """Within, the parts of the model may be called one by one: embedding, norm and head are whole, as FSDP makes a
    layer for its own forward."""
    policy.unshard()
    try:
        yield
    finally:
        policy.reshard()


@contextmanager
def unsharded(policy: Policy) -> Iterator[None]:
    """Within: parameters are whole plain tensors, and stay so after each forward, so that ranks may run as many as they
    like. No-op without FSDP.

    One rank: they are the storage of its shards, no copy; a base on the host is copied to the device. More ranks:
    entering is one all-gather of the base, on all of them together, into memory that is freed again; leaving is none.
    """
    sharded = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()  # the root group stays whole after a forward
    if sharded and dist.get_world_size() == 1:
        with _as_plain_modules(sharded), _shards_in_place(policy):
            yield
        return
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        with _as_plain_modules(sharded):  # FSDP notes forwards to prefetch by in the next backward
            yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not policy, recurse=False)


@contextmanager
def _as_plain_modules(sharded: list[FSDPModule]) -> Iterator[None]:
    """Within, their forwards are not FSDP's, which would gather into a second copy even what one rank has whole."""
    before = [(module._forward_pre_hooks, module._forward_hooks) for module in sharded]
    for module in sharded:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, (pre, post) in zip(sharded, before, strict=True):
            module._forward_pre_hooks, module._forward_hooks = pre, post


@contextmanager
def _shards_in_place(policy: Policy) -> Iterator[None]:
    """Within, each sharded parameter is the one shard there is of it, on the device that computes."""
    held = [
        (module._parameters, name, parameter)
        for module in policy.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    plain = {id(parameter): _only_shard(parameter) for *_, parameter in held}  # a tied head and its embedding are one
    try:
        for of_module, name, parameter in held:
            of_module[name] = plain[id(parameter)]
        yield
    finally:
        for of_module, name, parameter in held:
            of_module[name] = parameter


def _only_shard(parameter: DTensor) -> nn.Parameter:
    whole = parameter.detach().to_local()
    return nn.Parameter(whole.to(parameter.device_mesh.device_type), requires_grad=False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The whole plain tensor of a parameter at world size 1 (its one shard, no copy); plain ones as they are.

    RuntimeError with more ranks: there the weights are whole only inside `unsharded`."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() > 1:
        raise RuntimeError(f"this rank holds 1/{tensor.device_mesh.size()} of a weight; read it inside rollout_weights")
    return tensor.to_local()
