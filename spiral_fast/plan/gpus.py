"""GPUs as their data sheets describe them. Rates are dense (sheets also print twice that, for 2:4 sparsity)."""

from __future__ import annotations

from typing import NamedTuple

# Of the sheet's memory, left for the CUDA context, libraries' workspaces and the allocator's gaps.
RESERVE = 0.05


class Gpu(NamedTuple):
    memory: float  # bytes; the sheet's GB as 1e9
    flops: float  # bfloat16 tensor cores, FLOP/s
    bandwidth: float  # of its memory, bytes/s
    source: str
    devices: tuple[str, ...] = ()  # names under which CUDA knows it

    @property
    def usable(self) -> float:
        return self.memory * (1 - RESERVE)


GPUS = {
    "l4-24gb": Gpu(24e9, 121e12, 300e9, "NVIDIA L4 data sheet", ("NVIDIA L4",)),
    "rtx4090-24gb": Gpu(
        24e9, 165.2e12, 1008e9, "NVIDIA Ada GPU architecture white paper, float32 sums", ("NVIDIA GeForce RTX 4090",)
    ),
    "a100-40gb": Gpu(
        40e9, 312e12, 1555e9, "NVIDIA A100 data sheet", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")
    ),
    "l40s-48gb": Gpu(48e9, 362e12, 864e9, "NVIDIA L40S data sheet", ("NVIDIA L40S",)),
    "a100-80gb": Gpu(80e9, 312e12, 2039e9, "NVIDIA A100 80GB data sheet, SXM", ("NVIDIA A100-SXM4-80GB",)),
    "h100-pcie-80gb": Gpu(80e9, 756e12, 2000e9, "NVIDIA H100 data sheet, PCIe", ("NVIDIA H100 PCIe",)),
    "h100-80gb": Gpu(80e9, 989e12, 3350e9, "NVIDIA H100 data sheet, SXM", ("NVIDIA H100 80GB HBM3",)),
    "h100-nvl-94gb": Gpu(94e9, 835e12, 3900e9, "NVIDIA H100 data sheet, NVL", ("NVIDIA H100 NVL",)),
    "h200-141gb": Gpu(141e9, 989e12, 4800e9, "NVIDIA H200 data sheet, SXM", ("NVIDIA H200",)),
    "b200-180gb": Gpu(180e9, 2250e12, 8000e9, "NVIDIA DGX B200 data sheet, an eighth", ("NVIDIA B200",)),
}


def gpu_of(device: str) -> str | None:
    """The name in GPUS of what `torch.cuda.get_device_name` calls `device`; None for another GPU or a part of one."""
    return next((name for name, gpu in GPUS.items() if device in gpu.devices), None)
