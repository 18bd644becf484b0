"""FSDP2 at world size 1: the same step, with parameters held as sharded DTensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spiral_fast.config import ConfigError
from spiral_fast.learner.packed import pack
from spiral_fast.learner.policy import Policy


def shard(policy: Policy, device: torch.device) -> None:
    """Shard each decoder layer, then the rest (embedding, norm, head) in the root group, in place.

    The adapter must be on already: one added later would stay whole. Joins a process group set up by the launcher
    (torchrun), else makes one of this process alone.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise ConfigError(f"learner.fsdp: world size {dist.get_world_size()} is not supported, only 1")
    mesh = init_device_mesh(device.type, (1,))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    # FSDP takes the module of the first forward for its root, and the engine, which calls the layers, may be first
    with torch.no_grad():
        policy(pack([([0], [0])], device), 1.0)
    policy.reshard()


@contextmanager
def unsharded(policy: Policy) -> Iterator[None]:
    """Within: parameters are whole plain tensors, and stay so after each forward. No-op without FSDP."""
    sharded = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not policy, recurse=False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of a DTensor at world size 1 (its one shard, no copy); others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
