"""How the client of SGLang servers uses connections, and what it makes of servers that are none; the rest needs a real
one (tests/sglang/test_client.py)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from spiral_fast.rollout.sglang.client import Client, RequestRefused, ServerLost
from spiral_fast.rollout.sglang.connection import ByUrl

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


def answering(answer: Callable[[str], tuple[str, bytes]], use):
    """`use(url)` while a server answers each path so: status line and body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        status, body = answer(head.split()[1])
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            server.close()

    return asyncio.run(main())


PAGE = "200 OK", b"<!doctype html><title>Welcome</title>"
OTHERS = {"/server_info": b'{"version": 3}', "/model_info": b"[]", "/generate": b'{"text": "hello"}'}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda path: PAGE, "its answer is not SGLang's .JSONDecodeError"),
        (lambda path: ("200 OK", OTHERS.get(path, b"{}")), "its answer is not SGLang's .(KeyError|TypeError)"),
        (lambda path: ("200 OK", b"\xff\xfe" * 9), "its answer is not SGLang's"),
        (lambda path: ("404 Not Found", b"nothing here"), "nothing here"),
        (lambda path: ("302 Found", b""), "its answer is not SGLang's"),
        (lambda path: ("403 Forbidden", b""), "no or another API key; set SPIRAL_FAST_SERVER_KEY"),
        (lambda path: ("500 Internal Server Error", PAGE[1]), "it answered 500: <!doctype html>"),
    ],
    ids=["html", "json", "bytes", "404", "302", "403", "500"],
)
def test_something_else_that_answers(answer, words):
    """Every call ends in one line, never in an error of its own."""

    async def use(url):
        sampling = dict(adapter=None, max_new_tokens=3, temperature=1.0, stop_token_ids=[1])
        calls = {
            "identity": lambda c: c.identity(),
            "generate": lambda c: c.generate([2, 3], **sampling),
            "log_probs": lambda c: c.prompt_log_probs([2, 3], adapter=None),
        }
        for call in calls.values():
            client = Client(url, timeout_s=5.0)
            with pytest.raises((RequestRefused, ServerLost), match=words) as failed:
                await call(client)
            assert url in str(failed.value) and "\n" not in str(failed.value)
            await client.aclose()

    answering(answer, use)


def test_an_engine_asks_something_else_only_once():
    """A wrong URL is no server that still starts: nobody waits for start_timeout_s."""

    async def use(url):
        connection = ByUrl(url, None, 5.0, None)
        with pytest.raises(RequestRefused, match="it answers 404: is there an SGLang server"):
            await asyncio.wait_for(connection.open(), 20.0)
        await connection.close()

    answering(lambda path: ("404 Not Found", b""), use)


def test_each_opening_asks_anew_what_the_server_is():
    async def use(url):
        connection = ByUrl(url, None, 5.0, None)
        first = await connection.open()
        first._identity = object()
        second = await connection.open()
        assert second._identity is None
        await connection.close()

    answering(lambda path: ("200 OK", b""), use)
