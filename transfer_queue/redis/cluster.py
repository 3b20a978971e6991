"""Routing of commands: to one redis-server, or to the node of a Redis Cluster that owns the key's slot.

A `Node` holds the connections to one server and sends many commands in one round trip. It does not use redis-py's
pools: they may lose a connection when a call is cancelled while it waits for the pool's lock, and they cost a fifth of
a small command. TLS and login are redis-py's, the wire format is in `wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.transfer_queue.errors import QueueError
from penstock.transfer_queue.redis.wire import READ_BYTES, Wire, pack_commands

MAX_CONNECTIONS = 64
"""To one server at once; further calls wait for one."""


class NotSent(RedisTimeoutError):
    """No reply yet: the command was not sent, or its reply did not come in time."""


_NOT_SENT = NotSent("no reply in time")


@dataclass(slots=True, eq=False)
class RedisCall:
    """A command and its result: `error` is None once `reply` is set."""

    args: Sequence[Any]
    node: Node | None = None
    """The server that must run it; None: the one that holds its key."""
    script: str = ""
    """Name of the script that an FCALL or EVALSHA means."""
    reply: Any = None
    error: Exception | None = _NOT_SENT

    def forget(self) -> None:
        self.reply, self.error = None, _NOT_SENT


class Node:
    """The connections to one redis-server, and `Routes` to it. Safe for concurrent tasks of one event loop."""

    spreads = False

    def __init__(self, kind: Any, settings: dict[str, Any]) -> None:
        """`kind` is a class of redis-py's connections, made with `settings`."""
        self._kind = kind
        self._settings = settings
        self._idle: list[_Link] = []
        self._buffer = bytearray(READ_BYTES)
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._closed = False
        self.host = str(settings.get("host", "localhost"))

    @classmethod
    def of_url(cls, url: str, password: str | None, username: str | None) -> Node:
        """Raises `QueueError` for a URL that redis-py does not take."""
        login = {name: value for name, value in (("password", password), ("username", username)) if value is not None}
        try:
            pool = aioredis.ConnectionPool.from_url(
                url,
                # Callers bound every attempt. A read timeout of redis-py 8 swallows cancellations.
                socket_timeout=None,
                socket_connect_timeout=None,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                **login,
            )
        except ValueError as error:
            raise QueueError(f"queue URL {redact(url)!r}: {error}") from error
        return cls(pool.connection_class, pool.connection_kwargs)

    def beside(self, host: str, port: int) -> Node:
        """Another server of the same cluster: same login, same TLS."""
        return Node(self._kind, {**self._settings, "host": host, "port": port})

    async def run(self, calls: Sequence[RedisCall], *, asking: bool = False) -> None:
        """All commands in one round trip, in order. Each call ends with its reply or its error.

        `asking`: send ASKING before each, for a slot that is being imported.
        """
        for call in calls:
            call.forget()
        async with self._free:
            link = self._idle.pop() if self._idle else _Link(self._kind(**self._settings), self._buffer)
            try:
                await link.exchange(calls, asking)
            except (RedisError, OSError) as error:
                await link.disconnect()
                if isinstance(error, RedisConnectionError | OSError):
                    await self._drop_idle()  # what ended this connection has ended the idle ones too
                for call in calls:
                    if isinstance(call.error, NotSent):
                        call.error = error
            except BaseException:
                await link.disconnect()  # unread replies must not reach the next caller
                raise
            finally:
                if self._closed:
                    await link.disconnect()
                else:
                    self._idle.append(link)

    @property
    def masters(self) -> Sequence[Node]:
        return [self]

    async def close(self) -> None:
        """Running calls fail or end; then their connections are closed."""
        self._closed = True
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect()


class _Link:
    """A connection of redis-py and, while it is open, its wire."""

    def __init__(self, connection: AbstractConnection, buffer: bytearray) -> None:
        self._connection = connection
        self._buffer = buffer
        self._wire: Wire | None = None

    async def exchange(self, calls: Sequence[RedisCall], asking: bool) -> None:
        """Connects if it is not connected. Raises what ends the connection; refusals stay in the calls."""
        if self._wire is None:
            await self._connection.connect()
            self._wire = Wire(self._connection, self._buffer)
        commands = [call.args for call in calls]
        if asking:
            commands = [command for args in commands for command in (("ASKING",), args)]
        self._wire.send(pack_commands(commands))
        for call in calls:
            if asking:
                await self._wire.reply()
            reply = await self._wire.reply()
            if isinstance(reply, ResponseError):
                call.error = reply
            elif isinstance(reply, RedisError):  # such as LOADING: it ends the connection
                raise reply
            else:
                call.reply, call.error = reply, None

    async def disconnect(self) -> None:
        """Closes the connection and drops unsent bytes: a server that was stopped would run them and their repeat."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None
        await self._connection.disconnect(nowait=True)


def redact(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//[^@/]*@", "//", url)


_KEY_AT = {"EVAL": 3, "EVALSHA": 3, "FCALL": 3}
"""Command → position of its first key; 1 for all others that the queue sends."""


class Routes(Protocol):
    """Made and closed by `Connection`."""

    spreads: bool

    async def run(self, calls: Sequence[RedisCall]) -> None:
        """One attempt at each; commands to one server go in one round trip, in order. Errors stay in the calls."""

    @property
    def masters(self) -> Sequence[Node]:
        """Every server that holds keys; for a cluster according to the last slot map."""

    async def close(self) -> None: ...


class Cluster:
    """`Routes` by key slot.

    MOVED and ASK redirects are followed at once, each once per attempt. After a MOVED, a lost connection or a
    CLUSTERDOWN the slot map is fetched again from any node that answers.
    """

    spreads = True

    def __init__(self, seed: Node) -> None:
        self._seed = seed
        self._nodes: dict[tuple[str, int], Node] = {}
        self._slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._stale = True
        self._asking_for_map = asyncio.Lock()

    async def run(self, calls: Sequence[RedisCall]) -> None:
        for call in calls:
            call.forget()
        if error := await self._map():
            for call in calls:
                call.error = error
            return
        try:
            await self._send([(call.node or self._node_of(call.args), call) for call in calls])
            # MOVED is permanent: the map is stale. ASK is for one command.
            for asking in (False, True):
                again = [
                    (self._known(error.host, error.port), call)
                    for call in calls
                    if isinstance(error := call.error, AskError) and isinstance(error, MovedError) != asking
                ]
                self._stale = self._stale or bool(again and not asking)
                await self._send(again, asking)
        finally:  # a node that stays silent until the caller's timeout leaves no other trace
            self._stale = self._stale or any(_map_is_old(call.error) for call in calls)

    @property
    def masters(self) -> Sequence[Node]:
        return list({node: None for node in self._slots if node is not None})

    async def close(self) -> None:
        for node in [self._seed, *self._nodes.values()]:
            await node.close()

    async def _send(self, targets: Sequence[tuple[Node | None, RedisCall]], asking: bool = False) -> None:
        shares: dict[Node, list[RedisCall]] = {}
        for node, call in targets:
            if node is None:
                call.error = ClusterDownError("CLUSTERDOWN no node holds the slot")
            else:
                shares.setdefault(node, []).append(call)
        async with asyncio.TaskGroup() as group:
            for node, share in shares.items():
                group.create_task(node.run(share, asking=asking))

    def _node_of(self, args: Sequence[Any]) -> Node | None:
        """The node that holds the command's key; any node for a command without one."""
        keyless = {"CLUSTER", "CONFIG", "DBSIZE", "FUNCTION", "INFO", "PING", "SCAN", "SCRIPT", "TIME"}
        if args[0] in keyless:
            return next((node for node in self._slots if node is not None), self._seed)
        key = args[_KEY_AT.get(args[0], 1)]
        return self._slots[key_slot(key if isinstance(key, bytes) else str(key).encode())]

    def _known(self, host: str, port: int) -> Node:
        node = self._nodes.get((host, port))
        if node is None:
            node = self._nodes[host, port] = self._seed.beside(host, port)
        return node

    # the map of slots ----------------------------------------------------------------------------------------------
    async def _map(self) -> Exception | None:
        """Refresh the slot map if it is stale; returns the last error if no node answered."""
        async with self._asking_for_map:
            if not self._stale:
                return None
            known = random.sample(list(self._nodes.values()), len(self._nodes))
            error: Exception | None = None
            for node in [*known, self._seed]:
                call = RedisCall(("CLUSTER", "SLOTS"))
                with contextlib.suppress(TimeoutError):  # its error says that no reply came
                    # A node has 2 s for its slot map; then the next node is asked.
                    async with asyncio.timeout(2.0):
                        await node.run([call])
                if call.error is None:
                    await self._learn(call.reply, node)
                    return None
                error = call.error
            return error

    async def _learn(self, rows: Sequence[Any], source: Node) -> None:
        slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, master, *_ in rows:
            host = (master[0] or b"").decode() or source.host
            slots[first : last + 1] = [self._known(host, master[1])] * (last - first + 1)
        self._slots, self._stale = slots, None in slots
        masters = set(slots)
        for at in [at for at, node in self._nodes.items() if node not in masters]:
            await self._nodes.pop(at).close()


def _map_is_old(error: Exception | None) -> bool:
    """True for a lost connection and a server that does not own the slot; False for any other answer of Redis."""
    if isinstance(error, ResponseError):
        return isinstance(error, MovedError | ClusterDownError | ReadOnlyError)
    return error is not None
