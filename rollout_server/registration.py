"""A server's entry in the registry: renewed every second and at each change, taken out when it goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.rollout_server.queue_line import QueueLine
from penstock.transfer_queue import QueueError, ServerInfo

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
