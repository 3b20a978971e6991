"""A rollout server's calls to the queue: each within a deadline, and the entry in the registry renewed every second.

One build of one engine in a run: two would sample the tokens of one step by two programs (`BuildCheck`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from penstock.rollout_server.protocol import EngineError, EngineInfo
from penstock.transfer_queue import Announcement, AnnouncementMark, QueueError, ServerInfo, Status, WeightUpdate

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
QUEUE_S = 5.0
SETTING_OF_BUILD = {"vllm": "rollout.vllm_python", "sglang": "rollout.sglang_python"}
"""What chooses the environment that an engine is in; others are in this process's own."""
T = TypeVar("T")


class ServerQueue(Protocol):
    """The part of the queue that a rollout server uses."""

    async def latest_version(self) -> Announcement | None: ...
    async def latest_mark(self) -> AnnouncementMark | None: ...
    async def heartbeat(self, server: ServerInfo) -> None: ...
    async def deregister(self, server_id: str) -> None: ...
    async def report_update(self, update: WeightUpdate) -> None: ...
    async def servers(self) -> list[ServerInfo]: ...
    async def status(self) -> Status: ...


class QueueConnection:
    """Bounds each call and keeps the last error: ``await connection.ask(connection.queue.latest_version())``."""

    def __init__(self, queue: ServerQueue) -> None:
        self.queue = queue
        self.error: str | None = None
        """Of the last call; None where it succeeded."""

    async def ask(self, call: Awaitable[T]) -> T:
        """The result of `call` within `QUEUE_S`. Raises `QueueError`."""
        try:
            async with asyncio.timeout(QUEUE_S):
                answer = await call
        except TimeoutError as error:
            self.error = f"no answer in {QUEUE_S:g} s"
            raise QueueError(self.error) from error
        except QueueError as error:
            self.error = str(error)
            raise
        self.error = None
        return answer


class Registration:
    """Keeps the entry in the registry: renewed every `HEARTBEAT_S` and on `changed`, removed by `leave`."""

    def __init__(self, connection: QueueConnection, describe: Callable[[], ServerInfo | None]) -> None:
        """`describe` returns the entry; None: no entry yet, or none any more."""
        self.changed = asyncio.Event()
        """Set on changes that clients should see at once."""
        self._connection, self._describe = connection, describe
        # A heartbeat in progress must not restore the entry that `leave` removes.
        self._lock = asyncio.Lock()

    async def keep(self) -> None:
        """Sends heartbeats until cancelled; one that fails is repeated a second later."""
        while True:
            async with self._lock:
                await self._send_heartbeat()
            await wait_for_event(self.changed, HEARTBEAT_S)
            self.changed.clear()

    async def _send_heartbeat(self) -> None:
        if (entry := self._describe()) is None:
            return
        try:
            await self._connection.ask(self._connection.queue.heartbeat(entry))
        except QueueError as error:
            logger.warning("heartbeat: %s", error)

    async def leave(self, name: str) -> None:
        """Removes the entry; where the queue does not answer it expires. `describe` returns None from now on."""
        try:
            async with self._lock:
                await self._connection.ask(self._connection.queue.deregister(name))
        except QueueError as error:
            logger.warning("not deregistered, the entry will expire: %s", error)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when `event` is set, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def build_of(info: EngineInfo) -> str:
    """Name and version, as the registry has them."""
    return f"{info.name} {info.engine_version}"


class BuildCheck:
    """Of one server. Whichever comes later is refused, before it has its first request."""

    def __init__(self, connection: QueueConnection, name: str) -> None:
        self._connection, self._name = connection, name
        self._alike: EngineInfo | None = None

    async def compare(self, info: EngineInfo) -> None:
        """Once per engine; again at the next call where the queue is away. Raises `EngineError` where another server of
        the run has another build."""
        if info is self._alike:
            return
        try:
            others = await self._connection.ask(self._connection.queue.servers())
        except QueueError as error:
            logger.warning("engines of other servers are not compared: %s", error)
            return
        self._refuse_other(info, others)
        self._alike = info

    def _refuse_other(self, info: EngineInfo, servers: Iterable[ServerInfo]) -> None:
        mine, name = build_of(info), self._name
        if other := next((one for one in servers if one.server_id != name and one.engine not in ("", mine)), None):
            raise EngineError(
                f"{SETTING_OF_BUILD.get(info.name, 'rollout.engine')}: the engine of {name} is {mine}, and"
                f" {other.server_id} at {other.url} has {other.engine}: tokens of one step would be sampled by two"
                f" builds. Install {other.engine} for this server, or stop {other.server_id} first"
            )
