"""How a server is reached: by its URL, or by starting one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Protocol

from spiral_fast.config import Config
from spiral_fast.rollout.sglang.base_model import BaseModel
from spiral_fast.rollout.sglang.client import Client
from spiral_fast.rollout.sglang.server import ServerProcess

ASK_AGAIN_S = 2.0  # between two questions whether a lost server is back


class Connection(Protocol):
    url: str

    async def open(self) -> Client:
        """Returns once the server generates, however long that takes; again after it was lost. Raises ServerFailed."""

    async def close(self) -> None: ...


class ByUrl:
    def __init__(self, url: str, api_key: str | None, timeout_s: float, adapter_folder: Path | None):
        self.url = url.rstrip("/")
        self._make_client = partial(Client, url, api_key, timeout_s=timeout_s, adapter_folder=adapter_folder)
        self._client: Client | None = None

    async def open(self) -> Client:
        """A new client each time: whoever answers now is asked anew what it is."""
        await self.close()
        self._client = self._make_client()
        while not await self._client.alive(self._client.timeout_s):
            await asyncio.sleep(ASK_AGAIN_S)
        return self._client

    async def close(self) -> None:
        if self._client:
            await self._client.aclose()


class OwnServer:
    """A process of this run; each `open` starts one."""

    def __init__(self, config: Config, base: BaseModel, log: Path, adapter_folder: Path | None):
        self.url = "of this run"
        self._config, self._base, self._log, self._adapter_folder = config, base, log, adapter_folder
        self._process: ServerProcess | None = None
        self._starting: asyncio.Future | None = None
        self._client: Client | None = None

    async def open(self) -> Client:
        await self.close()
        self._process = process = ServerProcess(self._config, self._base, self._log)
        self._starting = asyncio.ensure_future(asyncio.to_thread(process.start))
        await asyncio.shield(self._starting)
        timeout_s = self._config.rollout.sglang.timeout_s
        self._client = Client(process.url, process.api_key, timeout_s=timeout_s, adapter_folder=self._adapter_folder)
        return self._client

    async def close(self) -> None:
        """At once: told to end, SGLang takes 5 to 10 seconds before it kills its processes itself."""
        if self._client:
            await self._client.aclose()
        if self._process:
            await asyncio.to_thread(self._process.stop, at_once=True)
            while not (await asyncio.wait({self._starting}, timeout=0.1))[0]:  # it may not have had a process yet
                await asyncio.to_thread(self._process.stop, at_once=True)
            self._starting.exception()
        self._client = self._process = None
