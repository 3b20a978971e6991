"""Streamed POSTs to an engine, against servers that answer byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.until import until

from penstock.rollout_server.engines.http.event_client import EngineAddress, EventClient

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"3\r\nabc\r\n0\r\n\r\n"
Answer = Callable[["SocketEngine", asyncio.StreamWriter], Awaitable[None]]


class SocketEngine:
    """A server on a unix socket; `answer` is called for each request."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self.socket = str(folder / "engine.sock")
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []
        self.gone = asyncio.Event()
        """A client has closed its connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.answer(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


class Kept:
    """A reply, and what came of it."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""
        self.cause: str | None = None
        self.ended = asyncio.Event()
        self.received = asyncio.Event()

    def begins(self, status: int) -> None:
        self.status = status

    def receives(self, data: bytes) -> None:
        self.data += data
        self.received.set()

    def ends(self, cause: str) -> None:
        assert self.cause is None
        self.cause = cause
        self.ended.set()

    async def over(self) -> Kept:
        await asyncio.wait_for(self.ended.wait(), 60)
        return self


@asynccontextmanager
async def engine(folder: Path, answer: Answer, keep_s: float = 60.0) -> AsyncIterator[tuple[SocketEngine, EventClient]]:
    served = SocketEngine(folder, answer)
    async with await asyncio.start_unix_server(served.serve, served.socket):
        client = EventClient(EngineAddress("http://engine", "secret", served.socket, keep_s))
        try:
            yield served, client
        finally:
            await client.close()


def ask(client: EventClient, body: bytes = b"{}") -> Kept:
    reply = Kept()
    client.post("/generate", body, reply)
    return reply


async def whole(_: SocketEngine, writer: asyncio.StreamWriter) -> None:
    writer.write(WHOLE)


async def byte_by_byte(_: SocketEngine, writer: asyncio.StreamWriter) -> None:
    for place in range(len(WHOLE)):
        writer.write(WHOLE[place : place + 1])
        await writer.drain()
        await asyncio.sleep(0)


async def half(_: SocketEngine, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"3\r\nabc\r\n")


async def half_and_gone(engine: SocketEngine, writer: asyncio.StreamWriter) -> None:
    await half(engine, writer)
    writer.close()


async def nonsense(_: SocketEngine, writer: asyncio.StreamWriter) -> None:
    writer.write(b"what?\r\n\r\n")


@pytest.mark.parametrize("answer", [whole, byte_by_byte])
async def test_a_response_comes_with_its_status_and_all_its_bytes(tmp_path: Path, answer: Answer) -> None:
    async with engine(tmp_path, answer) as (served, client):
        reply = await ask(client, b'{"a": 1}').over()
    assert (reply.status, reply.data, reply.cause) == (200, b"abc", "")
    (request,) = served.requests
    assert request.startswith(b"POST /generate HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in request
    assert request.endswith(b'\r\n\r\n{"a": 1}')


@pytest.mark.parametrize(("keep_s", "connections"), [(60.0, 1), (0.0, 3)])
async def test_connections_are_kept_as_long_as_the_address_says(
    tmp_path: Path, keep_s: float, connections: int
) -> None:
    async with engine(tmp_path, whole, keep_s) as (served, client):
        for _ in range(3):
            assert (await ask(client).over()).data == b"abc"
    assert served.connections == connections


async def test_requests_at_once_have_a_connection_each(tmp_path: Path) -> None:
    async with engine(tmp_path, whole) as (served, client):
        replies = [ask(client) for _ in range(4)]
        assert [(await reply.over()).data for reply in replies] == [b"abc"] * 4
    assert served.connections == 4


async def test_an_idle_connection_that_the_engine_closed_is_not_used_again(tmp_path: Path) -> None:
    async def once(_: SocketEngine, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)
        writer.close()

    async with engine(tmp_path, once) as (served, client):
        for _ in range(2):
            assert (await ask(client).over()).cause == ""
            await until(lambda: not client._idle)
    assert served.connections == 2


@pytest.mark.parametrize(("answer", "data"), [(half_and_gone, b"abc"), (nonsense, b"")])
async def test_a_response_that_is_not_whole_ends_with_a_cause(tmp_path: Path, answer: Answer, data: bytes) -> None:
    async with engine(tmp_path, answer) as (_, client):
        reply = await ask(client).over()
    assert reply.cause
    assert reply.data == data


async def test_an_engine_that_is_not_there_is_the_cause(tmp_path: Path) -> None:
    client = EventClient(EngineAddress("http://engine", "secret", str(tmp_path / "none.sock")))
    assert (await ask(client).over()).cause
    await client.close()


async def test_closing_an_exchange_closes_its_connection_and_reports_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path, half) as (served, client):
        reply = Kept()
        exchange = client.post("/generate", b"{}", reply)
        await asyncio.wait_for(reply.received.wait(), 60)
        exchange.close()
        await asyncio.wait_for(served.gone.wait(), 60)
    assert reply.cause is None


async def test_an_exchange_that_is_closed_before_it_is_connected_sends_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path, whole) as (served, client):
        client.post("/generate", b"{}", Kept()).close()
        assert (await ask(client).over()).data == b"abc"
    assert len(served.requests) == 1


async def test_closing_the_client_ends_what_is_under_way(tmp_path: Path) -> None:
    async with engine(tmp_path, half) as (_, client):
        reply = ask(client)
        await asyncio.wait_for(reply.received.wait(), 60)
        await client.close()
        assert (await reply.over()).cause


async def test_a_call_returns_the_status_and_raises_where_there_is_none(tmp_path: Path) -> None:
    async def refuse(_: SocketEngine, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno")

    async with engine(tmp_path, refuse) as (served, client):
        assert await client.call("/abort", b"{}", 60) == 404
        served.answer = half_and_gone
        with pytest.raises(ConnectionError):
            await client.call("/abort", b"{}", 60)
