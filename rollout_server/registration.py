"""A rollout server's calls to the queue: each within a deadline, and the entry in the registry renewed every second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from penstock.transfer_queue import Announcement, AnnouncementMark, QueueError, ServerInfo, Status, WeightUpdate

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
QUEUE_S = 5.0
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
