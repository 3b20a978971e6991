"""Which redis-server a command goes to: always the same one, or the one of a Redis Cluster that holds its key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Protocol

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError, ResponseError

from penstock.transfer_queue.node import Call, Node

_KEYLESS = {"ACL", "BGREWRITEAOF", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "INFO", "KEYS", "PING", "SCAN"}
_KEYLESS |= {"SCRIPT", "TIME"}
_KEY_AT = {"EVAL": 3, "EVALSHA": 3, "MEMORY": 2, "OBJECT": 2, "DEBUG": 2}
ASK_TIMEOUT_S = 2.0
"""For one node to say where the slots are; then another is asked."""


class Routes(Protocol):
    """Made and closed by `Connection`."""

    spreads: bool

    async def run(self, calls: Sequence[Call]) -> None:
        """One attempt at each; commands to one server go in one round trip, in order. Errors stay in the calls."""

    @property
    def masters(self) -> Sequence[Node]:
        """Every server that holds keys; of a cluster, as last heard of."""

    async def close(self) -> None: ...


class OneServer:
    """`Routes` where there is nothing to choose."""

    spreads = False

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(self, calls: Sequence[Call]) -> None:
        await self._node.run(calls)

    @property
    def masters(self) -> Sequence[Node]:
        return [self._node]

    async def close(self) -> None:
        await self._node.close()


class Cluster:
    """`Routes` by key slot.

    A MOVED is followed at once, an ASK too; both once per attempt. After a MOVED, a lost connection or a CLUSTERDOWN
    the map of slots is asked for again, from whichever node answers.
    """

    spreads = True

    def __init__(self, seed: Node) -> None:
        self._seed = seed
        self._nodes: dict[tuple[str, int], Node] = {}
        self._slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._stale = True
        self._asking_for_map = asyncio.Lock()

    async def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.forget()
        if error := await self._map():
            _give_up(calls, error)
            return
        try:
            await self._send([(call.node or self._node_of(call.args), call) for call in calls])
            await self._redirect([call for call in calls if isinstance(call.error, AskError)])
        finally:  # a node that is silent until the caller's patience ends is told apart in no other way
            self._stale = self._stale or any(_map_is_old(call.error) for call in calls)

    @property
    def masters(self) -> Sequence[Node]:
        return list({node: None for node in self._slots if node is not None})

    async def close(self) -> None:
        for node in [self._seed, *self._nodes.values()]:
            await node.close()

    async def _send(self, targets: Sequence[tuple[Node | None, Call]], *, asking: bool = False) -> None:
        shares: dict[Node, list[Call]] = {}
        for node, call in targets:
            if node is None:
                call.error = ClusterDownError("CLUSTERDOWN no node holds the slot")
            else:
                shares.setdefault(node, []).append(call)
        async with asyncio.TaskGroup() as group:
            for node, share in list(shares.items())[1:]:
                group.create_task(node.run(share, asking=asking))
            for node, share in list(shares.items())[:1]:  # here: most calls have one server, and a task costs time
                await node.run(share, asking=asking)

    async def _redirect(self, calls: Sequence[Call]) -> None:
        """Once more, where the first server said. A MOVED is for good: the map is old. An ASK is for this command."""
        for asking in (False, True):
            targets: list[tuple[Node | None, Call]] = []
            for call in calls:
                if isinstance(call.error, AskError) and isinstance(call.error, MovedError) != asking:
                    targets.append((self._known(call.error.host, call.error.port), call))
            self._stale = self._stale or bool(targets and not asking)
            if targets:
                await self._send(targets, asking=asking)

    def _node_of(self, args: Sequence[Any]) -> Node | None:
        key = key_of(args)
        if key is None:
            return next((node for node in self._slots if node is not None), self._seed)
        return self._slots[key_slot(key if isinstance(key, bytes) else str(key).encode())]

    def _known(self, host: str, port: int) -> Node:
        node = self._nodes.get((host, port))
        if node is None:
            node = self._nodes[host, port] = self._seed.beside(host, port)
        return node

    # the map of slots ----------------------------------------------------------------------------------------------
    async def _map(self) -> Exception | None:
        """Bring the map up to date where it is stale; the error where nobody could say."""
        async with self._asking_for_map:
            if not self._stale:
                return None
            known = random.sample(list(self._nodes.values()), len(self._nodes))
            error: Exception | None = None
            for node in [*known, self._seed]:
                call = Call(("CLUSTER", "SLOTS"))
                try:
                    async with asyncio.timeout(ASK_TIMEOUT_S):
                        await node.run([call])
                except TimeoutError as late:
                    call.error = late
                if call.error is None:
                    await self._learn(call.reply, node)
                    return None
                error = call.error
            return error

    async def _learn(self, rows: Sequence[Any], asked: Node) -> None:
        slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, master, *_ in rows:
            host = (master[0] or b"").decode() or asked.host
            slots[first : last + 1] = [self._known(host, master[1])] * (last - first + 1)
        self._slots, self._stale = slots, None in slots
        masters = set(slots)
        for at in [at for at, node in self._nodes.items() if node not in masters]:
            await self._nodes.pop(at).close()


def key_of(args: Sequence[Any]) -> Any | None:
    """The key that decides where a command runs; None where any server will do."""
    name = (args[0].decode() if isinstance(args[0], bytes) else args[0]).upper()
    if name in _KEYLESS:
        return None
    at = _KEY_AT.get(name, 1)
    return args[at] if len(args) > at else None


def _map_is_old(error: Exception | None) -> bool:
    """True for a lost connection and a server that does not own the slot; False for any other answer of Redis."""
    if isinstance(error, ResponseError):
        return isinstance(error, MovedError | ClusterDownError | ReadOnlyError)
    return error is not None


def _give_up(calls: Sequence[Call], error: Exception) -> None:
    for call in calls:
        call.error = error
