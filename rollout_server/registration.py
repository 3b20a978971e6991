"""A server's entry in the registry: renewed every second and at each change, taken out when it goes.

A rollout server's line to the queue: every call has a deadline, the last failure is remembered and shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from penstock.transfer_queue import Announcement, QueueError, ServerInfo, Status, WeightUpdate

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0


class Registration:
    """`describe` says what the entry is now; None where there is to be none yet, or no more."""

    def __init__(self, line: QueueLine, describe: Callable[[], ServerInfo | None]) -> None:
        self.changed = asyncio.Event()
        """Set by whoever changed something that clients should know at once."""
        self._line, self._describe = line, describe
        # A heartbeat under way must not put back what `leave` takes out.
        self._one_at_a_time = asyncio.Lock()

    async def keep(self) -> None:
        """Until cancelled. A queue that does not answer is told again a second later."""
        while True:
            async with self._one_at_a_time:
                await self._beat()
            await wait_for_event(self.changed, HEARTBEAT_S)
            self.changed.clear()

    async def _beat(self) -> None:
        if (entry := self._describe()) is None:
            return
        try:
            await self._line.ask(self._line.queue.heartbeat(entry))
        except QueueError as error:
            logger.warning("heartbeat: %s", error)

    async def leave(self, name: str) -> None:
        """Take the entry out, if the queue answers; the registry forgets silent servers by itself.

        `describe` says None from now on.
        """
        try:
            async with self._one_at_a_time:
                await self._line.ask(self._line.queue.deregister(name))
        except QueueError as error:
            logger.warning("not deregistered, the registry forgets by itself: %s", error)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when `event` is set, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


QUEUE_S = 5.0
T = TypeVar("T")


class ServerQueue(Protocol):
    """The part of the queue that a rollout server uses."""

    async def latest_version(self) -> Announcement | None: ...
    async def heartbeat(self, server: ServerInfo) -> None: ...
    async def deregister(self, server_id: str) -> None: ...
    async def report_update(self, update: WeightUpdate) -> None: ...
    async def servers(self) -> list[ServerInfo]: ...
    async def status(self) -> Status: ...


class QueueLine:
    """``await line.ask(line.queue.latest_version())``."""

    def __init__(self, queue: ServerQueue) -> None:
        self.queue = queue
        self.error: str | None = None
        """Of the last call; None where it was answered."""

    async def ask(self, call: Awaitable[T]) -> T:
        """The answer to `call` within `QUEUE_S`. Raises `QueueError`."""
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
