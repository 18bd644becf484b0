"""What an SGLang server says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LONGER_THAN_A_PROMPT = 4  # tokens by which prompt and completion may exceed SGLang's max_req_input_len


@dataclass(frozen=True)
class ServerIdentity:
    """None where it says nothing."""

    model_path: str
    dtype: str
    vocabulary: int | None
    max_context: int  # tokens, prompt and completion together
    cache_tokens: int | None  # tokens the KV cache holds
    tensor_parallel: int
    lora: bool
    max_lora_rank: int | None
    lora_modules: frozenset[str] | None
    deterministic: bool

    @classmethod
    def of(cls, info: dict[str, Any], model: dict[str, Any], vocabulary: int | None) -> ServerIdentity:
        """From its /server_info and /model_info."""
        modules = info.get("lora_target_modules")
        return cls(
            model_path=model["model_path"],
            dtype=str(info["dtype"]).removeprefix("torch."),
            vocabulary=vocabulary,
            max_context=info["max_req_input_len"] + LONGER_THAN_A_PROMPT,
            cache_tokens=info.get("max_total_num_tokens"),
            tensor_parallel=info["tp_size"],
            lora=bool(info.get("enable_lora")),
            max_lora_rank=info.get("max_lora_rank"),
            lora_modules=None if modules is None else frozenset(modules),
            deterministic=bool(info.get("enable_deterministic_inference")),
        )
