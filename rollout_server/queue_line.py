"""A rollout server's line to the queue: every call has a deadline, the last failure is remembered and shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from penstock.transfer_queue import Announcement, QueueError, ServerInfo, Status, WeightUpdate

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
