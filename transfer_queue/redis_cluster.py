"""A Redis Cluster on this machine: some redis-servers that share the 16384 slots. For tests and for trying out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import redis.asyncio as aioredis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from penstock.transfer_queue.queue import QueueError
from penstock.transfer_queue.redis_server import RedisServer


class RedisCluster:
    """`nodes` masters of a cluster on loopback, each with its own directory below `directory`.

    async with RedisCluster(directory, password) as cluster:
        queue = await RedisTransferQueue.connect(cluster.url, run, config, password)

    `start` returns once every node says ``cluster_state:ok``. A node of `servers` may be killed and restarted by its
    own methods, on the same port; `until_ok` waits until the others have it back.
    """

    def __init__(
        self, directory: Path, password: str, *, nodes: int = 3, start_timeout_s: float = 60.0, **options: Any
    ) -> None:
        """`options` go to each `RedisServer`."""
        if nodes < 1:
            raise QueueError(f"nodes: {nodes}; a cluster has at least one")
        self._password = password
        self._start_timeout_s = start_timeout_s
        self.servers = [
            RedisServer(Path(directory) / f"node-{number}", password, cluster=True, **options)
            for number in range(nodes)
        ]

    async def __aenter__(self) -> RedisCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Of the first node; clients find the others through it. Without the password."""
        return self.servers[0].url

    async def start(self) -> None:
        """Start all nodes, share the slots out and introduce the nodes to each other. Raises `QueueError`."""
        try:
            for server in self.servers:  # one after the other: each takes two free ports
                await server.start()
            await self._introduce()
            await self.until_ok()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all nodes. Twice is harmless."""
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def until_ok(self) -> None:
        """Wait until every node sees all slots served. Raises `QueueError` after `start_timeout_s`."""
        await asyncio.gather(*(self._until(server, _is_ok(len(self.servers))) for server in self.servers))

    async def ask(self, server: RedisServer, *command: Any) -> Any:
        """One command at one node, whatever it is in charge of. Raises `TimeoutError` after `start_timeout_s`."""
        client = aioredis.Redis.from_url(
            server.url, password=self._password, socket_timeout=None, socket_connect_timeout=None, protocol=2
        )
        async with asyncio.timeout(self._start_timeout_s), client:
            return await client.execute_command(*command)

    async def _introduce(self) -> None:
        if b"cluster_slots_assigned:0" not in await self._info(self.servers[0]):
            return  # started before, from the same directory: the nodes remember each other
        share = -(-REDIS_CLUSTER_HASH_SLOTS // len(self.servers))
        for number, server in enumerate(self.servers):
            slots = range(number * share, min((number + 1) * share, REDIS_CLUSTER_HASH_SLOTS))
            await self.ask(server, "CLUSTER ADDSLOTS", *slots)
            # Epochs of their own, so that nodes never have to settle who owns a slot.
            await self.ask(server, "CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            await self.ask(server, "CLUSTER MEET", "127.0.0.1", self.servers[0].port)

    async def _until(self, server: RedisServer, holds: Callable[[bytes], bool]) -> None:
        info = b""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not holds(info := await self._info(server)):  # noqa: ASYNC110 - another process: no event
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise QueueError(
                f"{server.url}: its cluster is not whole: {info.decode()}; see {server.log_file}"
            ) from error

    async def _info(self, server: RedisServer) -> bytes:
        reply = await self.ask(server, "CLUSTER", "INFO")
        return bytes(reply)


def _is_ok(nodes: int) -> Callable[[bytes], bool]:
    wanted = (b"cluster_state:ok", f"cluster_known_nodes:{nodes}".encode())
    return lambda info: all(line in info.split(b"\r\n") for line in wanted)
