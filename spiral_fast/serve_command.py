"""`spiral-fast serve`: an SGLang server for the model of a config, until it is told to stop."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from spiral_fast.config import Config, ConfigError
from spiral_fast.install import install_command
from spiral_fast.rollout.chosen import sglang_installed
from spiral_fast.rollout.sglang.names import KEY_VARIABLE


def serve(config: Config, host: str, port: int, log: Path | None, say: Callable[[str], None]) -> None:
    """Returns only by an exception: KeyboardInterrupt, or ServerFailed when the server does not start or ends by
    itself. No process of it is left."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and not _is_loopback(host):
        raise ConfigError(
            f"--host: {host!r} can be reached from other machines, and whoever reaches the server can use and change "
            f"its model: set {KEY_VARIABLE} to a key of your own here and where you train, or keep to 127.0.0.1"
        )
    if not sglang_installed():
        raise ConfigError(f"SGLang is not installed; run: {install_command('sglang')}")
    from spiral_fast.rollout.sglang.base_model import base_model
    from spiral_fast.rollout.sglang.server import ServerFailed, ServerProcess

    if log is None:
        log = Path(tempfile.mkdtemp(prefix="spiral-fast-serve-")) / "sglang_server.log"
    server = ServerProcess(config, base_model(config.model), log, host=host, port=port, api_key=key)
    say(f"starting SGLang; its log: {log}")
    try:
        server.start()
        url = server.url_on(socket.gethostname())
        say(f"serving {config.model.path} at {url}")
        say(f"train on it: spiral-fast train CONFIG 'rollout.servers=[\"{url}\"]'")
        if key:
            say(f"with {KEY_VARIABLE} set to the same key")
        while server.running():
            time.sleep(0.5)
        raise ServerFailed(f"the SGLang server ended by itself{server.log_end()}")
    finally:
        server.stop()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
