"""How the client of SGLang servers uses connections; the rest needs a server (tests/sglang/test_client.py)."""

from __future__ import annotations

import asyncio

from spiral_fast.rollout.sglang.client import Client

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_connection_that_the_server_closes_when_idle_is_no_lost_server():
    """The server answers once and resets the connection at the next request on it, as one does that found it idle for
    long enough just then."""
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await reader.read(1)
        writer.transport.abort()

    async def use() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", timeout_s=5.0)
        for _ in range(5):
            await client.flush()
        await asyncio.gather(*(client.flush() for _ in range(20)))
        await client.flush()
        await client.aclose()
        server.close()

    asyncio.run(use())
    assert len(connections) == 26
