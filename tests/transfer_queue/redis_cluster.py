"""A Redis Cluster on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any

import redis.asyncio as aioredis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from penstock.transfer_queue import QueueError, RedisServer


class RedisCluster:
    """`nodes` masters of a cluster on loopback, each with its own directory below `directory`.

    async with RedisCluster(directory, password) as cluster:
        queue = await RedisTransferQueue.connect(cluster.url, run, config, password)

    `start` returns once every node reports ``cluster_state:ok``. A node of `servers` may be killed and restarted with
    its methods, on the same port; `until_ok` waits until the others see it again.
    """

    def __init__(
        self, directory: Path, password: str, *, nodes: int = 3, start_timeout_s: float = 60.0, **options: Any
    ) -> None:
        """`options` go to each `RedisServer`."""
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
        """URL of the first node, without the password; clients find the other nodes through it."""
        return self.servers[0].url

    async def start(self) -> None:
        """Start all nodes, assign the slots and join the nodes. Raises `QueueError`."""
        try:
            for server in self.servers:  # one after the other: each takes two free ports
                await server.start()
            await self._introduce()
            await self.until_ok()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all nodes. A second call does nothing."""
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def until_ok(self) -> None:
        """Wait until every node sees all slots served. Raises `QueueError` after `start_timeout_s`."""
        await asyncio.gather(*map(self._until_ok, self.servers))

    async def ask(self, server: RedisServer, *command: Any) -> Any:
        """Run a command at one node, regardless of slots. Raises `TimeoutError` after `start_timeout_s`."""
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

    async def _until_ok(self, server: RedisServer) -> None:
        required, info = {b"cluster_state:ok", f"cluster_known_nodes:{len(self.servers)}".encode()}, b""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not required <= set((info := await self._info(server)).split(b"\r\n")):
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise QueueError(
                f"{server.url}: its cluster is not whole: {info.decode()}; see {server.log_file}"
            ) from error

    async def _info(self, server: RedisServer) -> bytes:
        reply = await self.ask(server, "CLUSTER", "INFO")
        return bytes(reply)
