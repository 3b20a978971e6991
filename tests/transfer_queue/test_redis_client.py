"""What `Connection` promises on one redis-server: order, one round trip, repeats, and what it refuses."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import BusyLoadingError, DataError, ResponseError
from redis_parts import (
    PASSWORD,
    Proxy,
    make_certificates,
    nothing_left_open,
    open_to,
    small_scripts,  # noqa: F401 - a fixture
)

from penstock.transfer_queue import BadPayload, LeaseLost, QueueError, QueueUnavailable, RedisServer, StepError
from penstock.transfer_queue.codec.packing import Packed
from penstock.transfer_queue.redis import Connection
from penstock.transfer_queue.redis.cluster import RedisCall

pytestmark = pytest.mark.redis


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path / "redis", PASSWORD) as started:
        yield started


@pytest.fixture
async def connection(server: RedisServer) -> AsyncIterator[Connection]:
    made = await open_to(server.url)
    yield made
    await made.close()


@pytest.fixture
async def proxied(server: RedisServer) -> AsyncIterator[tuple[Connection, Proxy]]:
    async with Proxy(server.port) as proxy:
        made = await open_to(proxy.url)
        yield made, proxy
        await made.close()


async def test_many_answer_in_order_and_in_python(connection: Connection) -> None:
    assert connection.spreads is False
    commands = [("SET", "a", b"\x00\xff"), ("GET", "a"), ("GET", "none"), ("HSET", "h", "x", 1), ("HGETALL", "h")]
    assert await connection.many(commands) == [True, b"\x00\xff", None, 1, {b"x": b"1"}]
    assert await connection.many([]) == []


async def test_a_stopped_redis_gets_no_late_copy(server: RedisServer, connection: Connection) -> None:
    (node,) = connection._routes.masters
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await node.run([RedisCall(("SET", "late", bytes(64 << 20)))])
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await asyncio.sleep(1)
    assert await connection.command("EXISTS", "late") == 0


async def test_a_script_sees_its_keys_and_arguments(connection: Connection) -> None:
    assert await connection.script("echo", "a", 1, "x", keys=["b", "c"]) == [[b"a", b"b", b"c"], [b"1", b"x"]]


async def test_scan_finds_every_key_of_the_pattern(connection: Connection) -> None:
    await connection.many([("SET", f"{kind}:{number}", 1) for kind in "ab" for number in range(3000)])
    found = [key async for chunk in connection.scan("a:*") for key in chunk]
    assert {int(key.partition(b":")[2]) for key in found} == set(range(3000))


async def test_write_and_run_is_one_round_trip(proxied: tuple[Connection, Proxy]) -> None:
    """No reply comes before the script was sent: a client that waits for the write's reply would wait for ever."""
    connection, proxy = proxied
    proxy.hold_for = b"FCALL"
    assert await connection.write_and_run([("SET", "payload", b"x" * 70_000)], "weigh", "h", keys=["payload"]) == [
        70_000,
        1,
    ]


async def test_only_what_got_no_reply_is_sent_again(proxied: tuple[Connection, Proxy]) -> None:
    connection, proxy = proxied
    proxy.let_through = len(":1\r\n")
    assert await connection.many([("INCR", "seen"), ("INCR", "lost")]) == [1, 2]
    assert await connection.many([("GET", "seen"), ("GET", "lost")]) == [b"1", b"2"]


async def test_a_lost_reply_repeats_the_write_and_the_script(proxied: tuple[Connection, Proxy]) -> None:
    connection, proxy = proxied
    await connection.write_and_run([("SET", "payload", b"")], "weigh", "other", keys=["payload"])
    proxy.let_through = 2
    writes = [("APPEND", "payload", b"xy")]
    assert await connection.write_and_run(writes, "weigh", "h", keys=["payload"]) == [4, 2]


@pytest.mark.parametrize(("functions", "flush"), [(True, "FUNCTION"), (False, "SCRIPT")])
async def test_scripts_come_back_after_a_flush(connection: Connection, functions: bool, flush: str) -> None:
    """Functions, or the scripts that a Redis 6.2 gets instead."""
    connection._functions = functions
    for _ in range(2):
        await connection.command(flush, "FLUSH")
        assert await connection.script("echo", "k") == [[b"k"], []]
    await connection.command(flush, "FLUSH")
    assert await connection.write_and_run([("APPEND", "p", b"xyz")], "weigh", "h", keys=["p"]) == [3, 1]


async def test_a_full_redis_is_waited_for(connection: Connection) -> None:
    await connection.script("echo", "k")  # loads the functions
    await connection.command("SET", "ballast", b"x" * 2_000_000)
    await connection.command("CONFIG", "SET", "maxmemory", (await connection.info())["used_memory"] // 2)
    calls = [
        asyncio.create_task(connection.command("SET", "a", 1)),
        asyncio.create_task(connection.script("grow", "runs")),
        asyncio.create_task(connection.write_and_run([("SET", "p", b"xy")], "weigh", "h", keys=["p"])),
    ]
    await until_refused(connection, 3)
    assert not any(call.done() for call in calls)
    assert await connection.command("EXISTS", "h") == 0, "a script ran without the payload that it acknowledges"
    await connection.command("UNLINK", "ballast")
    assert await asyncio.gather(*calls) == [True, 1, [2, 1]]


async def test_a_script_that_frees_memory_runs_when_there_is_none(connection: Connection) -> None:
    await connection.script("echo", "k")
    await connection.command("SET", "ballast", b"x" * 2_000_000)
    await connection.command("CONFIG", "SET", "maxmemory", (await connection.info())["used_memory"] // 2)
    assert await connection.script("grow_at_any_price", "runs") == 1


async def test_a_full_redis_takes_no_functions(connection: Connection, server: RedisServer) -> None:
    await connection.command("SET", "ballast", b"x" * 2_000_000)
    await connection.command("CONFIG", "SET", "maxmemory", (await connection.info())["used_memory"] // 2)
    hasty = await open_to(server.url)
    hasty._deadline_s = 2.0
    with pytest.raises(QueueUnavailable, match="raise maxmemory until they are loaded"):
        await hasty.script("echo", "k")
    await hasty.close()


async def test_a_server_that_hangs_up_is_asked_ever_more_rarely() -> None:
    """Without pauses it would be hundreds of connections until the deadline."""
    connections = 0

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(QueueUnavailable, match=f"127.0.0.1:{port} for"):
            await open_to(f"redis://127.0.0.1:{port}", deadline_s=1.0)
    # With half of each pause attempts begin at 0, 0.025, 0.075, 0.175, 0.375 and 0.775 s.
    assert 1 < connections <= 6


class Scripted:
    """`Routes` to a Redis of which a function gives the answers and errors; it raises what ends the whole attempt."""

    spreads = False
    masters = (None,)

    def __init__(self, answer: Callable[[str], object], pause_s: float = 0.0) -> None:
        self._answer, self._pause_s = answer, pause_s

    async def run(self, calls: Sequence[RedisCall]) -> None:
        await asyncio.sleep(self._pause_s)
        for call in calls:
            answer = self._answer(str(call.args[0]))
            call.reply, call.error = (None, answer) if isinstance(answer, Exception) else (answer, None)


def scripted(answer: Callable[[str], object], *, pause_s: float = 0.0, **options: float) -> Connection:
    routes: Any = Scripted(answer, pause_s)
    return Connection(routes, "redis://scripted", **{"deadline_s": 10.0, **options})


def answered(*answers: object, **options: float) -> Connection:
    """Gives these answers, one after the other."""
    rest = iter(answers)
    return scripted(lambda _: next(rest), **options)


def inside_a_script(error: str) -> ResponseError:
    """As Redis 6.2 reports it."""
    return ResponseError(f"ERR Error running script (call to f_1ab): @user_script:7: -{error} ")


async def test_an_error_inside_an_old_script_is_looked_into() -> None:
    full = inside_a_script("OOM command not allowed when used memory > 'maxmemory'.")
    assert await answered(full, ResponseError("BUSY another script"), b"1").command("GET", "a") == b"1"
    with pytest.raises(QueueError, match=r"redis://scripted: ERR Error running script .*WRONGTYPE"):
        await answered(inside_a_script("WRONGTYPE Operation"), b"1").command("GET", "a")


@pytest.mark.parametrize(
    "sent",
    [bytes(1000), memoryview(bytes(1000)), Packed([bytes(600), bytes(400)], 1000)],
    ids=["bytes", "view", "packed"],
)
async def test_an_attempt_has_time_for_what_it_sends(sent: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transfer_queue.redis.client.ATTEMPT_S", 0.02)
    monkeypatch.setattr("penstock.transfer_queue.redis.client.SLOWEST_BYTES_PER_S", 50)
    assert await answered(b"OK", pause_s=0.1).command("SET", "a", sent) is True
    with pytest.raises(QueueUnavailable, match="SET: no answer"):
        await answered(b"OK", pause_s=0.1, deadline_s=0.2).command("SET", "a", "text")


async def test_a_redis_that_reads_on_is_waited_for() -> None:
    clock, loaded = asyncio.get_running_loop().time, itertools.count(0, 4096)
    ready_at = clock() + 1.5

    def loading(command: str) -> object:
        if command == "INFO":
            return b"loading_loaded_bytes:%d\r\n" % next(loaded)
        return BusyLoadingError() if clock() < ready_at else b"1"

    async with asyncio.timeout(60):
        assert await scripted(loading, deadline_s=0.5, loading_timeout_s=60).command("GET", "a") == b"1"


async def test_a_redis_that_loads_without_progress_is_given_up() -> None:
    """It tells how far it is at every other question only."""
    questions = itertools.count()

    def stuck(command: str) -> object:
        if command != "INFO":
            return BusyLoadingError()
        if next(questions) % 2 == 0:
            raise TimeoutError
        return b"loading_loaded_bytes:4096\r\n"

    async with asyncio.timeout(60):
        with pytest.raises(QueueUnavailable, match="GET"):
            await scripted(stuck, deadline_s=0.5, loading_timeout_s=2.5).command("GET", "a")


async def test_a_redis_that_falls_silent_is_given_up(server: RedisServer) -> None:
    """The connection stands and replies do not come: no call may take that for an answer."""
    async with Proxy(server.port) as proxy, asyncio.timeout(60):
        connection = await open_to(proxy.url)
        connection._deadline_s = 0.5
        proxy.hold_for = b"never sent"
        for call in (connection.command("GET", "a"), connection.script("echo", "k")):
            with pytest.raises(QueueUnavailable, match="no reply in time") as caught:
                await call
            waited_s = re.search(r"for (\d+\.\d) s", str(caught.value))
            assert waited_s is not None
            assert 0.1 <= float(waited_s[1]) <= 60
        await connection.close()


async def test_an_argument_that_cannot_be_sent_is_not_repeated(connection: Connection) -> None:
    with pytest.raises(DataError):  # at its deadline a repeated call raises QueueUnavailable
        await connection.command("SET", "a", {"not": "bytes"})
    with pytest.raises(DataError, match="SET: int next to a payload"):
        await connection.command("SET", "a", memoryview(b"bytes"), 5)
    assert await connection.command("GET", "a") is None


async def test_a_payload_that_does_not_come_is_named(server: RedisServer) -> None:
    connection = await open_to(server.url)
    connection._deadline_s = 5.0
    with pytest.raises(QueueUnavailable, match=r"weigh: no answer from redis://.* for \d+\.\d s: RETRY no payload"):
        await connection.script("weigh", "h", keys=["nowhere"])
    await connection.close()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [("LEASELOST a", LeaseLost), ("BADPAYLOAD a", BadPayload), ("STEP a", StepError), ("QUEUE a", QueueError)],
)
async def test_refusals_are_raised_at_once(connection: Connection, reply: str, kind: type[QueueError]) -> None:
    with pytest.raises(kind, match=r"^a$"):
        await connection.script("refuse", "k", reply)
    with pytest.raises(kind, match=r"^a$"):
        await connection.write_and_run([("SET", "p", 1)], "refuse", "k", reply)


async def test_a_wrong_command_is_not_repeated(connection: Connection, server: RedisServer) -> None:
    await connection.command("SET", "text", 1)
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await connection.many([("INCR", "n"), ("HGET", "text", "x")])
    assert await connection.command("GET", "n") == b"1"


@pytest.mark.parametrize("library_hangs_up", [True, False])
async def test_a_cancelled_call_leaves_no_reply_to_the_next(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, library_hangs_up: bool
) -> None:
    """Whether redis-py ends the connection of a cancelled read, or leaves that to us."""
    read = partialmethod(AbstractConnection.read_response, disconnect_on_error=library_hangs_up)
    monkeypatch.setattr(AbstractConnection, "read_response", read)
    waiting = asyncio.create_task(connection.command("BLPOP", "list", 0))
    while (await connection.info())["blocked_clients"] == 0:
        await asyncio.sleep(0.005)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await connection.command("RPUSH", "list", "for the next")
    assert await asyncio.gather(*(connection.command("ECHO", str(n)) for n in range(100))) == [
        str(n).encode() for n in range(100)
    ]


async def test_a_call_that_outlives_close_takes_its_connection_along(
    server: RedisServer, connection: Connection
) -> None:
    closed = await open_to(server.url)
    with nothing_left_open():
        waiting = asyncio.create_task(closed.command("BLPOP", "list", 0))
        while (await connection.info())["blocked_clients"] == 0:
            await asyncio.sleep(0.005)
        await closed.close()
        await connection.command("RPUSH", "list", "x")
        assert await waiting == (b"list", b"x")
        del waiting, closed


async def test_one_server_gets_64_connections(connection: Connection, server: RedisServer) -> None:
    waiting = [asyncio.create_task(connection.command("BLPOP", "list", 0)) for _ in range(70)]
    other = await open_to(server.url)
    async with asyncio.timeout(60):
        while (await other.info())["blocked_clients"] < 64:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # in which a connection too many would come
    assert (await other.info())["blocked_clients"] == 64
    await other.command("RPUSH", "list", *range(70))
    assert len(await asyncio.gather(*waiting)) == 70
    await other.close()


async def test_calls_outlive_a_restart(connection: Connection, server: RedisServer) -> None:
    await connection.command("SET", "a", 1)
    await server.kill()
    calls = [asyncio.create_task(connection.command("GET", "a")) for _ in range(20)]
    await server.restart()
    assert await asyncio.gather(*calls) == [b"1"] * 20


async def test_tls(tmp_path: Path) -> None:
    async with RedisServer(tmp_path / "data", PASSWORD, **make_certificates(tmp_path)) as server:
        connection = await open_to(server.url)
        assert server.url.startswith("rediss://")
        assert await connection.script("echo", "k") == [[b"k"], []]
        await connection.close()
        with pytest.raises(QueueError, match=r"certificate verify failed.*\?ssl_ca_certs=FILE"):
            await open_to(server.url.partition("?")[0])
        with pytest.raises(QueueUnavailable):
            await open_to(server.url.replace("rediss", "redis").partition("?")[0], deadline_s=0.3)


async def test_a_wrong_login_is_refused(server: RedisServer) -> None:
    with pytest.raises(QueueError, match="refused the login"):
        await Connection.connect(server.url, deadline_s=120, password="wrong-password")


async def test_a_redis_that_evicts_is_refused(server: RedisServer, connection: Connection) -> None:
    await connection.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(QueueError, match=r"evicts keys when full \(maxmemory-policy allkeys-lru\)"):
        await open_to(server.url)


@asynccontextmanager
async def fake_redis(version: str, *answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Says its version, and gives these answers to GET and to scripts, then hangs up: its URL, and what it was sent."""
    info, left, seen = f"redis_version:{version}\r\n".encode(), list(answers), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            for command in data.split(b"*")[1:]:
                seen.append(command)
                if b"INFO" in command[4:14]:
                    writer.write(b"$%d\r\n%s\r\n" % (len(info), info))
                elif not any(name in command for name in (b"GET", b"EVALSHA", b"FCALL")):
                    writer.write(b"+OK\r\n")
                elif left:
                    writer.write(left.pop(0))
                else:
                    writer.close()
                    return
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


@pytest.mark.parametrize("version", ["5.0.14", "6.0.99"])
async def test_an_old_redis_is_refused(version: str) -> None:
    """Of the old one only its INFO is needed."""
    async with fake_redis(version) as (url, _):
        with pytest.raises(QueueError, match=rf"runs Redis {re.escape(version)}; 6\.2 or newer is needed"):
            await open_to(url)


@pytest.mark.parametrize(("version", "command"), [("6.2.0", b"EVALSHA"), ("7.0.0", b"FCALL")])
async def test_a_redis_without_functions_gets_scripts(version: str, command: bytes) -> None:
    async with fake_redis(version, b"+done\r\n") as (url, seen):
        connection = await open_to(url)
        assert await connection.script("echo", "k") == b"done"
        assert command in seen[-1]
        await connection.close()


@pytest.mark.parametrize(
    ("answers", "deadline_s", "cause"),
    [
        ([b"-BUSY another script\r\n"], 2.0, "Connection closed by server"),
        ([b"-BUSY another script\r\n"] * 99, 0.4, "BUSY another script"),
        ([b"$70000\r\n%bXX" % bytes(70_000)] * 99, 0.4, "a string of 70000 bytes is not followed by a line end"),
    ],
    ids=["hangs-up", "busy", "no-line-end"],
)
async def test_the_newest_cause_is_named(answers: list[bytes], deadline_s: float, cause: str) -> None:
    async with fake_redis("7.0.0", *answers) as (url, _):
        connection = await open_to(url)
        connection._deadline_s = deadline_s
        with pytest.raises(QueueUnavailable, match=f"GET: no answer from {url} .*{cause}"):
            await connection.command("GET", "a")
        await connection.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://:secret@host:port"])
async def test_a_wrong_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(QueueError, match="queue URL") as caught:
        await open_to(url)
    assert "secret" not in str(caught.value)


async def until_refused(connection: Connection, times: int) -> None:
    """Wait until Redis has refused that many commands for want of memory."""
    while True:
        stats = (await connection.command("INFO", "errorstats")).get("errorstat_OOM", {"count": 0})
        if stats["count"] >= times:
            return
        await asyncio.sleep(0.01)
