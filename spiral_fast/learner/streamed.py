"""A model whose weights go tensor by tensor from safetensors into the shards of its parameters: no rank ever holds the
whole base, on the host or on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

Place = tuple[nn.Module, str]  # module and the parameter's name in it

OPENED_AT_ONCE = (
    64 << 20
)  # bytes read through one mapping of a file: its pages count as this process's while it is open


class Streamed:
    """The base of a checkpoint, first as shapes on `meta`. Its tensors must have the very names of the parameters."""

    def __init__(self, source: str, config: PretrainedConfig, dtype: torch.dtype):
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        self.model.name_or_path = source
        try:
            self.model.generation_config = GenerationConfig.from_pretrained(source)
        except OSError:  # there is none
            pass
        self._buffers_known = _real_buffers(self.model)
        names = {id(p): name for name, p in self.model.named_parameters()}  # a tied one once
        self._places: dict[str, list[Place]] = {name: [] for name in names.values()}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places[names[id(parameter)]].append((module, name))
        self._files = files_of(source)

    def fits(self) -> bool:
        """Whether the checkpoint's tensors are the model's parameters, name by name and shape by shape, and nothing in
        it is to be converted. If not, from_pretrained knows better, or says what is wrong."""
        kept = self.model._keep_in_fp32_modules or self.model._keep_in_fp32_modules_strict
        tied = self.model.all_tied_weights_keys
        if getattr(self.model.config, "transformers_weights", None):  # another file's name
            return False
        if kept or not self._buffers_known or any(name in tied for name in self._files) or self._persistent_buffers():
            return False
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        if any(".layers." in name and name.endswith(".weight") for name in self._files.keys() - shapes.keys()):
            return False
        return shapes.items() <= dict(_shapes(self._files)).items()

    def with_adapter(self, put_on: Callable[[PreTrainedModel], PeftModel]) -> PeftModel:
        """`put_on` sees parameters of the right shapes, dtypes and device that take no memory, and so makes the adapter
        that it would make on the weights. Afterwards the base is on `meta` again."""
        self._set(lambda p: torch.empty((), dtype=p.dtype).expand(p.shape))
        model = put_on(self.model)
        self._set(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
        return model

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """Read into each parameter, or into this rank's shard of it, what is its own."""
        self._set(lambda p: torch.empty_like(p, device=device))
        of_file = sorted((str(self._files[name]), name) for name in self._places)
        for file, group in groupby(of_file, lambda pair: pair[0]):
            names = [name for _, name in group]
            while names:
                read = 0
                with safe_open(file, "pt") as tensors:
                    while names and read < OPENED_AT_ONCE:
                        name = names.pop()
                        module, attribute = self._places[name][0]
                        read += _read(tensors.get_slice(name), module._parameters[attribute])

    def _set(self, make: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Replace each parameter; a tied one stays tied."""
        for places in self._places.values():
            module, name = places[0]
            parameter = nn.Parameter(make(module._parameters[name]), requires_grad=False)
            for module, name in places:
                module._parameters[name] = parameter

    def _persistent_buffers(self) -> bool:
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return bool(self.model.state_dict().keys() - parameters)


def files_of(source: str) -> dict[str, Path]:
    """Tensor -> the safetensors file that holds it, of a folder or a hub id (then fetched); {} where there is none."""
    optional = dict(_raise_exceptions_for_missing_entries=False)
    if file := cached_file(source, SAFE_WEIGHTS_NAME, **optional):  # before an index, as from_pretrained
        with safe_open(file, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), Path(file))
    if index := cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **optional):
        files, metadata = get_checkpoint_shard_files(source, index)
        paths = {Path(file).name: Path(file) for file in files}
        return {name: paths[file] for name, file in metadata["weight_map"].items()}
    return {}


def _shapes(files: dict[str, Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in set(files.values()):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                found = tensors.get_slice(name)
                if found.get_dtype() in ("BF16", "F16", "F32", "F64"):
                    yield name, tuple(found.get_shape())


def _read(stored, parameter: nn.Parameter) -> int:
    """The rows of this rank's shard (dimension 0), or all; cast on the way. Returns the bytes read."""
    if isinstance(parameter, DTensor):
        (rows, *_), (first, *_) = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        target = parameter.to_local()
        if not rows:
            return 0
        values = stored[first : first + rows]
    else:
        target, values = parameter, stored[:]
    target.copy_(values)
    return values.nbytes


def _real_buffers(model: PreTrainedModel) -> bool:
    """What no checkpoint holds, such as rotary frequencies, computed on the CPU by transformers' own rule. Whether it
    knew them all."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # leave it alone
    for module in model.modules():
        if module._buffers:
            for name, buffer in module._buffers.items():
                if not buffer.is_floating_point():
                    return False
                module._buffers[name] = torch.full_like(buffer, torch.nan, device="cpu")
            model._init_weights(module)
    return not any(buffer.isnan().any() for buffer in model.buffers())
