"""For tests of what talks to Redis: small scripts under names of their own, and a proxy that meddles."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from penstock.transfer_queue import RedisServer, TransferQueueConfig
from penstock.transfer_queue.redis import Connection
from penstock.transfer_queue.redis.scripts import Script, make_library

PASSWORD = "a-test-password"
CONFIG = TransferQueueConfig(deadline_s=120.0, registry_ttl_s=60.0)
SCRIPTS = {
    "echo": "return {KEYS, ARGV}",
    "refuse": "return redis.error_reply(ARGV[1])",
    "weigh": "if redis.call('EXISTS', KEYS[2]) == 0 then return redis.error_reply('RETRY no payload') end"
    " redis.call('HDEL', KEYS[1], '')"  # a write that Redis allows when memory is full allows all that follow
    " return {redis.call('STRLEN', KEYS[2]), redis.call('HINCRBY', KEYS[1], 'runs', 1)}",
    "grow": "return redis.call('HINCRBY', KEYS[1], 'runs', 1)",
    "grow_at_any_price": "redis.call('HDEL', KEYS[1], '') return redis.call('HINCRBY', KEYS[1], 'runs', 1)",
    "write_field": "return redis.call('HSET', ARGV[1], 'field', 'new')",
    "read_field": "return redis.call('HGET', ARGV[1], 'field')",
    "commit_and_forget": "redis.call('HSET', KEYS[1] .. 'steps', 'committed_step', 1)"
    " return redis.call('DEL', KEYS[1] .. 'group:train/0')",
}
MAKES_ROOM = {"weigh", "grow_at_any_price"}


@pytest.fixture(autouse=True)
def small_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {name: ("allow-oom",) if name in MAKES_ROOM else () for name in SCRIPTS}
    made = {name: Script(name, source, flags[name]) for name, source in SCRIPTS.items()}
    monkeypatch.setattr("penstock.transfer_queue.redis.client.script", made.__getitem__)
    monkeypatch.setattr("penstock.transfer_queue.redis.client.library", lambda: make_library(made.values()))


async def open_to(url: str, deadline_s: float = 120.0) -> Connection:
    return await Connection.connect(url, deadline_s=deadline_s, password=PASSWORD)


async def ask(server: RedisServer, question: Callable[[aioredis.Redis], Awaitable[Any]]) -> Any:
    """Asks by redis-py, without a `Connection` of ours. A read timeout of redis-py 8 would swallow cancellations."""
    client = aioredis.Redis.from_url(server.url, password=PASSWORD, protocol=2, socket_timeout=None)
    async with client:
        return await question(client)


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """No connection to Redis is dropped without being closed: the collector does not close it in time, or at all."""
    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(one.message) for one in seen if "unclosed Connection" in str(one.message)] == []


class Proxy:
    """Between client and Redis. `let_through`: bytes of replies until it cuts; `hold_for`: replies wait for these
    bytes in a request; `pieces`: draws in how many bytes at a time replies are sent on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.let_through: int | None = None
        self.hold_for = b""
        self.pieces: Callable[[], int] | None = None
        self._seen = asyncio.Event()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        forward = asyncio.create_task(self._forward(reader, up_writer))
        try:
            while data := await up_reader.read(1 << 16):
                if self.hold_for:
                    await self._seen.wait()
                if self.let_through is not None:
                    writer.write(data[: self.let_through])
                    self.let_through = None
                    break
                await self._send(writer, data)
        except asyncio.CancelledError:
            return  # the test is over
        finally:
            forward.cancel()
            writer.close()
            up_writer.close()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        while data:
            size = len(data) if self.pieces is None else self.pieces()
            writer.write(data[:size])
            await writer.drain()
            await asyncio.sleep(0 if self.pieces is None else 0.0005)  # else the socket joins what follows
            data = data[size:]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.hold_for and self.hold_for in data:
                self._seen.set()
            writer.write(data)


def make_certificates(folder: Path) -> dict[str, Path]:
    """A CA of our own and a certificate of 127.0.0.1: options of `RedisServer`."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with: apt-get install openssl")
    files = {name: folder / f"{name}.pem" for name in ("tls_ca", "ca_key", "tls_cert", "tls_key", "request")}
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("req", "-x509", *key, "-keyout", files["ca_key"], "-out", files["tls_ca"], "-subj", "/CN=test CA")
    _openssl("req", *key, "-keyout", files["tls_key"], "-out", files["request"], "-subj", "/CN=127.0.0.1")
    signing = ["-CA", files["tls_ca"], "-CAkey", files["ca_key"], "-CAcreateserial", "-extfile", extensions]
    _openssl("x509", "-req", "-in", files["request"], *signing, "-out", files["tls_cert"])
    return {name: files[name] for name in ("tls_ca", "tls_cert", "tls_key")}


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
