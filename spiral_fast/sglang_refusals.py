"""What of `rollout.engine`, `rollout.servers` and `rollout.sglang` cannot be used together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from spiral_fast.config import Config

# Flags of SGLang that follow from other keys: name -> where to set it instead.
OWN_FLAGS = {
    "model_path": "model.path",
    "model": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "model.dtype",
    "random_seed": "seed",
    "device": "device",
    "tensor_parallel_size": "rollout.sglang.tensor_parallel",
    "tp_size": "rollout.sglang.tensor_parallel",
    "tp": "rollout.sglang.tensor_parallel",
    "mem_fraction_static": "rollout.sglang.memory_fraction",
    "max_running_requests": "rollout.max_running",
    "chunked_prefill_size": "rollout.prefill_chunk",
    "max_total_tokens": "rollout.cache_tokens",
    "enable_deterministic_inference": "rollout.sglang.deterministic",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "host": "spiral-fast serve --host",
    "port": "spiral-fast serve --port",
    "api_key": "the environment variable SPIRAL_FAST_SERVER_KEY",
    "admin_api_key": "the environment variable SPIRAL_FAST_SERVER_KEY",
}
FIXED_FLAGS = (
    "config",
    "context_length",
    "enable_lora",
    "enable_memory_saver",
    "lora_paths",
    "max_loaded_loras",
    "max_loras_per_batch",
    "schedule_policy",
    "skip_server_warmup",
    "skip_tokenizer_init",
    "trust_remote_code",
)


def sglang_refusals(config: Config) -> list[tuple[str, Any, str]]:
    """Key, value and reason."""
    rollout, found = config.rollout, []
    if rollout.servers and rollout.engine == "radix":
        why = "rollout.engine: radix is embedded and uses no server; set it to sglang or remove the servers"
        found.append(("rollout.servers", rollout.servers, why))
    for url in rollout.servers:
        if flaw := _flaw(url):
            found.append(("rollout.servers", url, f"{flaw}; a server is given as http://host:port"))
    if len({url.rstrip("/") for url in rollout.servers}) < len(rollout.servers):
        found.append(("rollout.servers", rollout.servers, "a server is named twice"))
    if rollout.batch_invariant and (rollout.servers or rollout.engine == "sglang"):
        found.append(("rollout.batch_invariant", True, "only the embedded engine can; set rollout.engine: radix"))
    for name, value in rollout.sglang.args.items():
        key, flag = f"rollout.sglang.args.{name}", name.removeprefix("--").replace("-", "_")
        if flag in OWN_FLAGS:
            found.append((key, value, f"it is set by {OWN_FLAGS[flag]}"))
        elif flag in FIXED_FLAGS:
            found.append((key, value, "spiral-fast sets it itself"))
        elif not flag.isidentifier():
            found.append((key, value, "a flag is written as SGLang's own name, for example attention_backend: fa3"))
        elif value is False:
            found.append((key, value, "a flag that is off is left out; remove it"))
    return found


def _flaw(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises for a port that is none
    except ValueError as error:
        return f"not a URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "not an http or https URL"
    if parts.username is not None or parts.password is not None:
        return "keys do not belong into a config: use the environment variable SPIRAL_FAST_SERVER_KEY"
    if parts.query or parts.fragment:
        return "it has a query"
    return None
