"""What goes over one connection arrives unchanged, whatever carries it: plain sockets and TLS, both event loops."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis_parts import PASSWORD, Proxy, make_certificates, open_to

from penstock.transfer_queue import QueueError, RedisServer

pytestmark = pytest.mark.redis
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
SIZES = [0, 1, 100, 16_384, 65_535, 65_536, 65_537, 300_000, 3_000_000]


def options_of(kind: str, folder: Path) -> dict[str, Any]:
    """Of `RedisServer`."""
    if kind == "tls":
        return dict(make_certificates(folder))
    return {"unix_socket": folder / "s"} if kind == "unix" else {}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_values_of_any_size_come_back(tmp_path: Path, kind: str, loop: str) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(send_and_read(tmp_path, options_of(kind, tmp_path)))


async def send_and_read(folder: Path, options: dict[str, Any]) -> None:
    """Several callers at once, so that the wires of one node take turns with their buffer."""
    values = {str(size): random.Random(size).randbytes(size) for size in SIZES}
    async with RedisServer(folder / "data", PASSWORD, **options) as server:
        connection = await open_to(server.url)
        await connection.many([("SET", name, value) for name, value in values.items()])
        await connection.many([("SET", f"view {name}", memoryview(value)) for name, value in values.items()])

        async def read(seed: int) -> None:
            names = random.Random(seed).sample([*values, *(f"view {name}" for name in values)], 2 * len(values))
            found = await connection.many([("GET", name) for name in names])
            assert found == [values[name.removeprefix("view ")] for name in names]

        await asyncio.gather(*(read(seed) for seed in range(8)))
        await connection.close()


async def test_a_long_string_stays_whatever_is_received_after_it(redis_server: RedisServer) -> None:
    """Each has its memory for itself."""
    values = {str(n): random.Random(n).randbytes(600_000 + n) for n in range(40)}
    connection = await open_to(redis_server.url)
    await connection.many([("SET", name, value) for name, value in values.items()])
    kept = []
    for _ in range(3):
        found = await connection.many([("GET", name) for name in values])
        assert found == list(values.values())
        kept.append((found[7], found[39]))
        del found
        gc.collect()
    assert kept == [(values["7"], values["39"])] * 3
    assert all(view.readonly for pair in kept for view in pair)
    await connection.close()


async def test_a_refusal_among_replies_stays_with_its_command(redis_server: RedisServer) -> None:
    connection = await open_to(redis_server.url)
    await connection.many([("DEL", "list"), ("RPUSH", "list", 1, 2.5, "ä")])
    assert await connection.command("LRANGE", "list", 0, -1) == [b"1", b"2.5", "ä".encode()]
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await connection.many([("LLEN", "list"), ("INCR", "list"), ("LLEN", "list")])
    assert await connection.command("LLEN", "list") == 3
    await connection.close()


@pytest.mark.parametrize("seed", range(4))
async def test_replies_arrive_in_any_pieces(redis_server: RedisServer, seed: int) -> None:
    """Long strings as replies and as parts of one, between numbers, lists, nothing and refusals, cut anywhere."""
    chance = random.Random(seed)
    values = {f"piece {size}": chance.randbytes(size) for size in (5, 65_535, 65_536, 70_000, 200_000)}
    answers: list[tuple[tuple[Any, ...], Any]] = [
        *((("GET", name), value) for name, value in values.items()),
        (("MGET", *values, "missing"), [*values.values(), None]),
        (("MGET", "piece 70000"), [values["piece 70000"]]),
        (("GET", "missing"), None),
        (("STRLEN", "piece 65536"), 65_536),
        (("ECHO", b"$70000\r\n"), b"$70000\r\n"),
    ]
    async with Proxy(redis_server.port) as proxy:
        connection = await open_to(proxy.url)
        await connection.many([("SET", name, value) for name, value in values.items()])
        proxy.pieces = lambda: chance.choice([1, 2, 7, 5_000, 65_536, 65_536, 100_000])
        asked = chance.choices(answers, k=12)
        assert await connection.many([command for command, _ in asked]) == [answer for _, answer in asked]
        with pytest.raises(QueueError, match="WRONGTYPE"):
            await connection.many([("GET", "piece 200000"), ("LLEN", "piece 5"), ("GET", "piece 70000")])
        assert await connection.many([("GET", "piece 70000"), ("PING",)]) == [values["piece 70000"], True]
        await connection.close()


async def test_a_long_reply_that_is_cut_off_is_asked_for_again(redis_server: RedisServer) -> None:
    value = random.Random(5).randbytes(150_000)
    async with Proxy(redis_server.port) as proxy:
        connection = await open_to(proxy.url)
        await connection.many([("SET", "long", value)])
        for let_through in (3, 10, 60_000):
            proxy.let_through = let_through
            assert await connection.many([("GET", "long"), ("GET", "long")]) == [value, value]
            assert proxy.let_through is None, "no reply was cut"
        await connection.close()
