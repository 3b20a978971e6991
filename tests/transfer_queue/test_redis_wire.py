"""What goes over one connection arrives unchanged, whatever carries it: plain sockets and TLS, both event loops."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis_parts import PASSWORD, make_certificates, open_to

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


async def test_a_refusal_among_replies_stays_with_its_command(redis_server: RedisServer) -> None:
    connection = await open_to(redis_server.url)
    await connection.many([("DEL", "list"), ("RPUSH", "list", 1, 2.5, "ä")])
    assert await connection.command("LRANGE", "list", 0, -1) == [b"1", b"2.5", "ä".encode()]
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await connection.many([("LLEN", "list"), ("INCR", "list"), ("LLEN", "list")])
    assert await connection.command("LLEN", "list") == 3
    await connection.close()
