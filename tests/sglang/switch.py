"""One address with one server behind it or another, as after a restart."""

from __future__ import annotations

import asyncio
import threading
from urllib.parse import urlsplit


class Switch:
    """Passes bytes on to the server at `target`, a URL that may change; its own is `url`. To be closed."""

    def __init__(self, target: str):
        self.target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = self._in_loop(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def turn(self, target: str) -> None:
        """To another server; all connections end."""

        async def cut() -> None:
            self.target = target
            for writer in self._open:
                writer.transport.abort()

        self._in_loop(cut())

    def close(self) -> None:
        self.turn(self.target)
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _in_loop(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = urlsplit(self.target)
        other_reader, other_writer = await asyncio.open_connection(there.hostname, there.port)
        both = {writer, other_writer}
        self._open |= both
        try:
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
        except ConnectionError:
            pass
        finally:
            self._open -= both


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while some := await reader.read(65536):
        writer.write(some)
        await writer.drain()
    writer.close()
