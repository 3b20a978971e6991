"""A rollout server's calls to the queue: each within a deadline, and the entry in the registry renewed every second.

One build of one engine in a run: two would sample the tokens of one step by two programs (`BuildCheck`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeVar

from penstock.rollout_server.protocol import EngineError, EngineInfo
from penstock.transfer_queue import (
    Announcement,
    AnnouncementMark,
    QueueError,
    ServerInfo,
    Status,
    UsageReport,
    WeightUpdate,
)

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
QUEUE_S = 5.0
LOOK_AGAIN_S = 0.1
"""Between two looks at a server of another build that may give way."""
UNDECIDED_S = 10.0
"""Time to decide: more than a call to the queue takes, and than the entry of a dead server is kept."""
T = TypeVar("T")


class ServerQueue(Protocol):
    """The part of the queue that a rollout server uses."""

    async def latest_version(self) -> Announcement | None: ...
    async def latest_mark(self) -> AnnouncementMark | None: ...
    async def heartbeat(self, server: ServerInfo) -> None: ...
    async def deregister(self, server_id: str) -> None: ...
    async def report_update(self, update: WeightUpdate) -> None: ...
    async def report_usage(self, usage: UsageReport) -> None: ...
    async def servers(self) -> list[ServerInfo]: ...
    async def status(self) -> Status: ...


class QueueConnection:
    """Bounds each call and keeps the last error: ``await connection.ask(connection.queue.latest_version())``."""

    def __init__(self, queue: ServerQueue) -> None:
        self.queue = queue
        self.error: str | None = None
        """Error of the last call; None if it succeeded."""

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

    async def announce(self) -> None:
        """Sends the entry at once. Raises `QueueError`."""
        async with self._lock:
            if (entry := self._describe()) is not None:
                await self._connection.ask(self._connection.queue.heartbeat(entry))

    async def keep(self) -> None:
        """Sends heartbeats until cancelled; one that fails is repeated a second later."""
        while True:
            try:
                await self.announce()
            except QueueError as error:
                logger.warning("heartbeat: %s", error)
            await wait_for_event(self.changed, HEARTBEAT_S)
            self.changed.clear()

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
    """Refuses a server, before its first request, if one of another build was there first.

    Two servers that start together may both look before either is registered. So each registers as closed and looks
    again: the second one sees the first. An open server stays. Of two closed ones the later name gives way and leaves;
    the other waits for that, and gives way itself at the deadline, because its rival looked before it registered.
    """

    def __init__(self, connection: QueueConnection, name: str) -> None:
        self._connection, self._name = connection, name
        self._alike: EngineInfo | None = None

    async def compare(self, info: EngineInfo, register: Callable[[], Awaitable[None]]) -> None:
        """Once per engine; again at the next call where the queue is away. `register` enters the registry, not
        accepting. Raises `EngineError` where another server of the run has another build: the caller then leaves it."""
        if info is self._alike:
            return
        try:
            if others := await self._unlike(info):
                self._refuse(info, others[0])
            await register()
            others = await self._unlike(info)
        except QueueError as error:
            logger.warning("engines of other servers are not compared: %s", error)
            return
        give_up_at = time.monotonic() + UNDECIDED_S
        while others:
            stays = next((one for one in others if one.accepting or one.server_id < self._name), None)
            if stays is not None or time.monotonic() > give_up_at:
                self._refuse(info, stays or others[0])
            await asyncio.sleep(LOOK_AGAIN_S)
            with contextlib.suppress(QueueError):  # `give_up_at` ends this too
                others = await self._unlike(info)
        self._alike = info

    async def _unlike(self, info: EngineInfo) -> list[ServerInfo]:
        servers = await self._connection.ask(self._connection.queue.servers())
        return [one for one in servers if one.server_id != self._name and one.engine not in ("", build_of(info))]

    def _refuse(self, info: EngineInfo, other: ServerInfo) -> NoReturn:
        # The environment of a stock server has a setting; other engines are in this process's own.
        setting = f"rollout.{info.name}_python" if info.name in ("vllm", "sglang") else "rollout.engine"
        raise EngineError(
            f"{setting}: the engine of {self._name} is {build_of(info)}, and"
            f" {other.server_id} at {other.url} has {other.engine}: tokens of one step would be sampled by two"
            f" builds. Install {other.engine} for this server, or stop {other.server_id} first"
        )
