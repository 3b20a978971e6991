"""One redis-server: its connections, and many commands in one round trip.

Made without redis-py's pools: those may lose a connection to a cancellation while they wait for their own lock, and
cost a fifth of a small command. Wire format, TLS, login and parsing are redis-py's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.transfer_queue.packing import Packed
from penstock.transfer_queue.queue import QueueError

MAX_CONNECTIONS = 64
"""To one server at once; further calls wait for one."""
_READ_BYTES = 1 << 16


class NotSent(RedisTimeoutError):
    """No reply yet: the command was not sent, or its reply did not come in time."""

    def __init__(self) -> None:
        super().__init__("no reply in time")


@dataclass(slots=True, eq=False)
class Call:
    """One command and what became of it: `error` is None once `reply` is there."""

    args: Sequence[Any]
    node: Node | None = None
    """Where it must run; None: where its key lives."""
    script: str = ""
    """Name of the script that an EVALSHA means."""
    reply: Any = None
    error: Exception | None = None

    def forget(self) -> None:
        self.reply, self.error = None, NotSent()


class Node:
    """The connections to one redis-server. Safe for many tasks of one event loop; ended by `close`."""

    def __init__(self, url: str, password: str | None = None, username: str | None = None) -> None:
        login = {name: value for name, value in (("password", password), ("username", username)) if value is not None}
        try:
            pool = aioredis.ConnectionPool.from_url(
                url,
                # Callers bound every attempt. A read timeout of redis-py 8 swallows cancellations.
                socket_timeout=None,
                socket_connect_timeout=None,
                socket_read_size=_READ_BYTES,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                **login,
            )
        except ValueError as error:
            raise QueueError(f"queue URL {redact(url)!r}: {error}") from error
        self._take(pool.connection_class, pool.connection_kwargs)

    def _take(self, kind: Any, settings: dict[str, Any]) -> None:
        self._kind = kind
        self._settings = settings
        self._idle: list[AbstractConnection] = []
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._closed = False
        self.host = str(settings.get("host", "localhost"))
        self.port = int(settings.get("port", 6379))

    def beside(self, host: str, port: int) -> Node:
        """Another server of the same cluster: same login, same TLS."""
        node = Node.__new__(Node)
        node._take(self._kind, {**self._settings, "host": host, "port": port})
        return node

    async def run(self, calls: Sequence[Call], *, asking: bool = False) -> None:
        """All commands in one round trip, in order. Each call ends with its reply or its error.

        `asking`: each is preceded by ASKING, for a slot that is just moving here.
        """
        for call in calls:
            call.forget()
        async with self._free:
            connection = self._idle.pop() if self._idle else self._kind(**self._settings)
            try:
                await _exchange(connection, calls, asking)
            except (RedisError, OSError) as error:
                await self._lost(connection, calls, error)
            except BaseException:
                await connection.disconnect(nowait=True)  # replies that nobody reads must not reach the next caller
                raise
            finally:
                await self._put_back(connection)

    async def close(self) -> None:
        """Calls still running fail or end; their connections are closed behind them."""
        self._closed = True
        await self._drop_idle()

    async def _lost(self, connection: AbstractConnection, calls: Sequence[Call], error: Exception) -> None:
        await connection.disconnect(nowait=True)
        if isinstance(error, RedisConnectionError | OSError):
            await self._drop_idle()  # what ended this connection has ended the idle ones too
        for call in calls:
            if isinstance(call.error, NotSent):
                call.error = error

    async def _put_back(self, connection: AbstractConnection) -> None:
        if self._closed:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append(connection)

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)


def redact(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//[^@/]*@", "//", url)


def _wire(connection: AbstractConnection, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """The commands in Redis's protocol, buffers of a packed payload as they lie."""
    chunks: list[Any] = []
    for command in commands:
        if any(isinstance(arg, Packed) for arg in command):
            chunks += _gathered(connection, command)
        else:
            chunks += connection.pack_command(*command)
    return chunks


def _gathered(connection: AbstractConnection, command: Sequence[Any]) -> list[Any]:
    chunks: list[Any] = [b"*%d\r\n" % len(command)]
    for arg in command:
        if isinstance(arg, Packed):
            chunks += [b"$%d\r\n" % arg.size, *arg.buffers, b"\r\n"]
        else:
            plain = connection.encoder.encode(arg)
            chunks.append(b"$%d\r\n%b\r\n" % (len(plain), plain))
    return chunks


async def _exchange(connection: AbstractConnection, calls: Sequence[Call], asking: bool) -> None:
    await connection.connect()
    commands = [call.args for call in calls]
    if asking:
        commands = [command for args in commands for command in (("ASKING",), args)]
    await connection.send_packed_command(_wire(connection, commands), check_health=False)
    for call in calls:
        if asking:
            await connection.read_response()
        try:
            call.reply = await connection.read_response()
            call.error = None
        except ResponseError as error:
            call.error = error
