"""Lets SGLang run on a machine without a GPU. Its kernel package `sgl_kernel` is published for CUDA only; with
`SGLANG_USE_CPU_ENGINE=1` SGLang imports it and then computes in plain torch, but for four things:

- it imports names that it does not call on this path: any name is found here, and says so when called;
- its LoRA modules ask for pinned memory, which torch refuses without an accelerator;
- deterministic inference knows neither the CPU's attention nor how to be without its CUDA kernels, of which the CPU,
  in one thread and for the sizes of tests, has no need;
- it samples a request with a seed through a hash, torch.ops.sgl_kernel.murmur_hash32_cpu.

For tests alone, and only where torch finds no accelerator.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch

from sgl_kernel.hashing import murmur_hash32

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; there is none on this machine")

    return absent


library = torch.library.Library("sgl_kernel", "FRAGMENT")
library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


class UnpinnedTorch(types.ModuleType):
    """torch, but for the argument pin_memory of what makes a tensor. Given to SGLang's LoRA modules only: transformers
    tells torch's own functions by identity."""

    FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")

    def __getattr__(self, name: str):
        found = getattr(torch, name)
        if name not in self.FACTORIES:
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


def without_pinned_memory(module: types.ModuleType) -> None:
    module.torch = UnpinnedTorch("torch")


def deterministic_on_cpu(choices: types.ModuleType) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def without_batch_invariant_kernels(module: types.ModuleType) -> None:
    module.enable_batch_invariant_mode = lambda: None


AFTER_IMPORT = {
    "sglang.srt.lora.layers": without_pinned_memory,
    "sglang.srt.lora.backend.torch_backend": without_pinned_memory,
    "sglang.srt.arg_groups.choices": deterministic_on_cpu,
    "sglang.srt.batch_invariant_ops": without_batch_invariant_kernels,
}


class ChangedModules(importlib.machinery.PathFinder):
    """Finds the modules of AFTER_IMPORT, and changes them once they are there."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in AFTER_IMPORT:
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            AFTER_IMPORT[name](module)

        spec.loader.exec_module = exec_module
        return spec


if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = lambda self, *_: self
    sys.meta_path.insert(0, ChangedModules)
    for loaded in AFTER_IMPORT.keys() & sys.modules.keys():
        AFTER_IMPORT[loaded](sys.modules[loaded])
