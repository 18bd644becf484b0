"""Lets SGLang run on a machine without a GPU. Its kernel package `sgl_kernel` is published for CUDA only; with
`SGLANG_USE_CPU_ENGINE=1` SGLang imports it and then computes in plain torch, but for three things:

- it imports names that it does not call on this path: any name is found here, and says so when called;
- its LoRA modules ask for pinned memory, which torch refuses without an accelerator;
- requests with a seed are sampled through a hash, torch.ops.sgl_kernel.murmur_hash32_cpu.

For tests alone, and only where torch finds no accelerator.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch

from sgl_kernel import hashing  # noqa: F401  registers the operator

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; there is none on this machine")

    return absent


class UnpinnedTorch(types.ModuleType):
    """torch, but for the argument pin_memory of what makes a tensor. Given to SGLang's LoRA modules only: transformers
    tells torch's own functions by identity."""

    FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")

    def __getattr__(self, name: str):
        found = getattr(torch, name)
        if name not in self.FACTORIES:
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


class LoraModules(importlib.machinery.PathFinder):
    """Finds the modules that pin memory, and gives them UnpinnedTorch once they are there."""

    NAMES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.NAMES:
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.torch = UnpinnedTorch("torch")

        spec.loader.exec_module = exec_module
        return spec


if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = lambda self, *_: self
    sys.meta_path.insert(0, LoraModules)
