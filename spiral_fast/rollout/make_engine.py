"""Which engine a run uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from spiral_fast.batch_invariant import check_possible
from spiral_fast.config import Config, ConfigError
from spiral_fast.rollout.chosen import chosen_engine, refuse_absent_sglang
from spiral_fast.rollout.engine import Engine
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.supported import windowed_layer


def make_engine(
    config: Config,
    loaded,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Engine:
    """The engine of `rollout.engine` for the learner's own model (`loaded`: a LoadedModel). Servers write their logs
    into `folder`, by default a temporary one; `say` is told when one is lost or back. Raises ConfigError."""
    if chosen_engine(config.rollout, cuda=loaded.device.type == "cuda") == "sglang":
        return _sglang(config, loaded, folder, say)
    rollout = config.rollout
    if rollout.batch_invariant:
        try:
            check_possible(loaded.causal_lm)
        except ValueError as error:
            raise ConfigError(f"rollout.batch_invariant: true cannot be used: {error}") from None
    return RadixEngine(
        loaded.causal_lm,
        loaded.eos_token_ids,
        max_context=loaded.max_context,
        max_running=rollout.max_running,
        prefill_chunk=rollout.prefill_chunk,
        cache_tokens=rollout.cache_tokens,
        watch_weights=not config.learner.fsdp,
        batch_invariant=rollout.batch_invariant,
        roles=loaded.roles,
    )


def _sglang(config: Config, loaded, folder: Path | None, say: Callable[[str], None]) -> Engine:
    from spiral_fast.learner.policy_source import PolicySource
    from spiral_fast.rollout.sglang.connection import ByUrl, OwnServer
    from spiral_fast.rollout.sglang.engine import SglangEngine
    from spiral_fast.rollout.sglang.names import KEY_VARIABLE

    rollout = config.rollout
    if rollout.batch_invariant:
        raise ConfigError("rollout.batch_invariant: true needs the embedded engine; set rollout.engine: radix")
    if layer := windowed_layer(loaded.causal_lm.config):  # the canary is shorter than a window: it would not notice
        raise ConfigError(
            f"rollout.engine: 'sglang' cannot be used: the model's {layer}, which SGLang leaves out for some "
            "architectures; set rollout.engine: radix"
        )
    if rollout.servers:
        key = os.environ.get(KEY_VARIABLE)

        def connect(folder: Path):
            return [ByUrl(url, key, rollout.sglang.timeout_s, folder / "adapters") for url in rollout.servers]
    else:
        refuse_absent_sglang()
        from spiral_fast.rollout.sglang.base_model import base_model

        base = base_model(config.model)

        def connect(folder: Path):
            return [OwnServer(config, base, folder / "sglang_server.log", folder / "adapters")]

    return SglangEngine(
        connect,
        PolicySource(loaded),
        temperature=rollout.temperature,
        max_running=rollout.max_running,
        timeout_s=rollout.sglang.timeout_s,
        start_timeout_s=rollout.sglang.start_timeout_s,
        deterministic=rollout.sglang.deterministic,
        shares_gpu=not rollout.servers and loaded.device.type == "cuda",
        folder=folder,
        say=say,
    )
